/* ThreadSanitizer knows what it has compiled, and the standard library comes compiled without it. Most of that library's
 * locks is inlined into its users, where the sanitizer sees it; what is not, or what it does not model, is below. The
 * linker puts these wrappers in place of the functions (`--wrap`), and they tell the sanitizer what each does: nothing of
 * the checked program is changed. `scripts/sanitize.sh thread` builds this file with the functions' mangled names. */
#include <stdbool.h>
#include <stdint.h>

void __tsan_acquire(void *);
void __tsan_release(void *);

#define JOIN(a, b) a##b
#define PASTE(a, b) JOIN(a, b)
#define REAL(name) PASTE(__real_, name)
#define WRAP(name) PASTE(__wrap_, name)

/* Mutex::lock, where another thread has it. */
void REAL(LOCK)(uint32_t *mutex);
void WRAP(LOCK)(uint32_t *mutex) {
    REAL(LOCK)(mutex);
    __tsan_acquire(mutex);
}

/* Condvar::wait and wait_timeout: they let go of the mutex and take it again. A duration comes as two numbers. */
void REAL(WAIT)(uint32_t *condvar, uint32_t *mutex);
void WRAP(WAIT)(uint32_t *condvar, uint32_t *mutex) {
    __tsan_release(mutex);
    REAL(WAIT)(condvar, mutex);
    __tsan_acquire(mutex);
}

bool REAL(WAIT_TIMEOUT)(uint32_t *condvar, uint32_t *mutex, uint64_t seconds, uint32_t nanoseconds);
bool WRAP(WAIT_TIMEOUT)(uint32_t *condvar, uint32_t *mutex, uint64_t seconds, uint32_t nanoseconds) {
    __tsan_release(mutex);
    bool woken = REAL(WAIT_TIMEOUT)(condvar, mutex, seconds, nanoseconds);
    __tsan_acquire(mutex);
    return woken;
}

/* Once::call, behind OnceLock: whoever comes back from it sees what the one call did. */
void REAL(ONCE)(uint32_t *once, bool poisoned_too, void *closure, void *vtable);
void WRAP(ONCE)(uint32_t *once, bool poisoned_too, void *closure, void *vtable) {
    REAL(ONCE)(once, poisoned_too, closure, vtable);
    __tsan_acquire(once);
    __tsan_release(once);
}

/* The last owner of an Arc acquires by a fence behind the subtraction, and the sanitizer does not model fences: an acquire
 * fence acquires what this thread's last subtraction read. */
static _Thread_local volatile void *subtracted;

uint64_t __real___tsan_atomic64_fetch_sub(volatile uint64_t *from, uint64_t number, int order);
uint64_t __wrap___tsan_atomic64_fetch_sub(volatile uint64_t *from, uint64_t number, int order) {
    subtracted = from;
    return __real___tsan_atomic64_fetch_sub(from, number, order);
}

void __real___tsan_atomic_thread_fence(int order);
void __wrap___tsan_atomic_thread_fence(int order) {
    __real___tsan_atomic_thread_fence(order);
    if (subtracted) {
        __tsan_acquire((void *)subtracted);
    }
}

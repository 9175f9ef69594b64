"""The ctypes module without torch and without a GPU: against the fake CUDA of the repository's tests.

`cargo test -p pinring-mapped-allocator` runs it, and names the two libraries in the environment."""

import ctypes
import os
import sys
import threading
import unittest

import pinring_mapped as pm

FAKE = os.environ["PINRING_FAKE_LIBRARY"]


class Module(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.fake = ctypes.CDLL(FAKE)
        cls.fake.fake_auto_run(ctypes.c_uint8(1), ctypes.c_uint64(0))
        pm.use_libraries(FAKE, FAKE)
        pm.print_errors(False)

    def tearDown(self):
        pm.use(False)
        self.assertEqual(pm.release(), 0)
        for counts in pm.statistics():
            self.assertEqual((counts.live_bytes, counts.live, counts.waiting_bytes, counts.cached_bytes), (0, 0, 0, 0))

    def test_memory_is_written_by_the_host_and_found_by_its_device_address(self):
        pointer = pm.pool_malloc(10000, 0, None)
        host = pm.host_ptr_of(pointer)
        ctypes.memset(host, 42, 10000)
        back = ctypes.create_string_buffer(3)
        self.fake.fake_device_bytes(ctypes.c_uint64(pointer + 9997), back, None, ctypes.c_size_t(3))
        self.assertEqual(back.raw, b"***")
        self.assertEqual(pm.host_ptr_of(pointer + 9999), host + 9999)
        self.assertEqual(pm.host_ptr_of(pointer + 10000), 0)
        pm.pool_free(pointer, 10000, 0, None)

    def test_mode_and_override(self):
        self.assertEqual(pm.is_mode(), 0)
        pm.use(True)
        self.assertEqual(pm.is_mode(), 1)
        pinned = pm.malloc(512, 0, None)
        self.assertEqual(pm.override(0), -1)
        device = pm.malloc(512, 0, None)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(pm.override(-1)))
        thread.start()
        thread.join()
        self.assertEqual(seen, [-1], "an override is one thread's")
        self.assertEqual(pm.override(-1), 0)
        self.assertNotEqual(pm.host_ptr_of(pinned), 0)
        self.assertEqual(pm.host_ptr_of(device), 0)
        self.assertEqual([counts.live for counts in pm.statistics(0)], [1, 1])
        self.assertEqual([counts.live for counts in pm.statistics(1)], [0, 0])
        for pointer in (pinned, device):
            pm.free(pointer, 512, 0, None)

    def test_failures_have_a_text(self):
        self.assertIsNone(pm.pool_malloc(4096, 7, None))
        self.assertIn("there is no device 7", pm.last_error())
        pm.free(0x123456, 1, 0, None)
        self.assertIn("0x123456 was not freed", pm.last_error())
        with self.assertRaisesRegex(RuntimeError, "cannot be named any more"):
            pm.use_libraries(FAKE, FAKE)

    def test_a_tensor_will_do_where_an_address_does(self):
        class Tensor:
            def data_ptr(self):
                return pointer

        pointer = pm.pool_malloc(64, 0, None)
        self.assertEqual(pm.host_ptr_of(Tensor()), pm.host_ptr_of(pointer))
        pm.pool_free(pointer, 64, 0, None)
        self.assertIn("live_bytes=0", repr(pm.statistics()[0]))

    @unittest.skipUnless("torch" not in sys.modules, "torch is here")
    def test_importing_needs_no_torch(self):
        self.assertNotIn("torch", sys.modules)


if __name__ == "__main__":
    unittest.main()

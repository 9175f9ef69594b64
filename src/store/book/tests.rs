//! What may be used again, and when.

use super::*;

const RULES: Rules = Rules { back: 0, forward: 0, stride: 1, by_lane: false, least: 1, skip_masked: false };

/// Writes one step; false if there is no chunk for it.
fn step(book: &mut Book, lane: u32) -> bool {
    let opened = book.open(lane, |_, _| {}).is_some();
    if opened {
        book.publish_step(lane, None, &|_| Meta::default());
    }
    opened
}

/// A store of `capacity` steps that was written three times over.
fn full(capacity: usize, lanes: usize) -> Book {
    let (size, count) = chunks(capacity, lanes).unwrap();
    let mut book = Book::new(RULES, capacity, size, count, lanes);
    (0..3 * capacity).for_each(|at| assert!(step(&mut book, (at % lanes) as u32)));
    book
}

#[test]
fn chunks_are_not_used_again_while_a_save_reads_them() {
    for (capacity, lanes) in [(1, 1), (2, 1), (7, 2), (64, 1), (300, 3)] {
        let mut book = full(capacity, lanes);
        let spans = book.begin_save();
        assert!(spans.iter().map(Span::len).sum::<usize>() >= capacity, "{capacity} of {lanes} lanes");
        let mut opened = Vec::new();
        // The oldest is not read yet: lanes go on where chunks are free, and then wait, however long.
        for _ in 0..4 * capacity + 1000 {
            for lane in 0..lanes as u32 {
                let known = book.lanes[lane as usize].chunks.back().copied();
                if step(&mut book, lane) {
                    let chunk = *book.lanes[lane as usize].chunks.back().unwrap();
                    opened.extend((Some(chunk) != known).then_some(chunk));
                }
            }
        }
        assert!((0..lanes as u32).all(|lane| !step(&mut book, lane)), "{capacity} of {lanes} lanes");
        for chunk in &opened {
            assert!(spans.iter().all(|span| span.chunk != *chunk), "chunk {chunk} was used again unread: {spans:?}");
        }
        // One that was read lets one lane go on, a chunk at a time.
        book.read(spans[0].chunk);
        assert!(step(&mut book, 0), "{capacity} of {lanes} lanes");
        spans[1..].iter().for_each(|span| book.read(span.chunk));
        (0..3 * capacity).for_each(|at| assert!(step(&mut book, (at % lanes) as u32)));
    }
}

#[test]
fn chunks_are_not_used_again_while_a_gather_of_their_time_goes_on() {
    for clear in [false, true] {
        let mut book = full(8, 1);
        let issued = book.issue();
        if clear {
            book.clear();
        }
        let written = (0..1000).take_while(|_| step(&mut book, 0)).count();
        assert!(written < 1000, "the gather keeps what lived when it was issued");
        let later = book.issue();
        book.finish(issued);
        assert!(step(&mut book, 0), "the later gather is in nobody's way yet");
        book.finish(later);
        assert!((0..1000).all(|_| step(&mut book, 0)));
    }
}

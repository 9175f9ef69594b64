//! smoke
use pinring::*;
use std::time::Instant;
fn run(bytes: usize, leaves: usize, writers: usize, lanes: usize, inplace: bool, total_rows: usize) {
    let mut step = Step::new();
    let ls: Vec<_> = if bytes == 29 {
        vec![
            step.observation::<u8>("a", &[16]),
            step.leaf::<u8>("b", &[8]),
            step.leaf::<u8>("c", &[4]),
            step.leaf::<u8>("d", &[1]),
        ]
    } else {
        let each = bytes / leaves;
        (0..leaves).map(|i| step.leaf::<u8>(&format!("l{i}"), &[each])).collect()
    };
    let sizes: Vec<usize> = step.leaves().iter().map(|l| l.bytes()).collect();
    let feed = Feed::builder(Sample::step(step)).batch(512).buffers(3).start().unwrap();
    let learner = feed.learner().unwrap();
    let t = Instant::now();
    let per = total_rows / writers / lanes;
    let hs: Vec<_> = (0..writers)
        .map(|_| {
            let mut w = feed.writer(lanes).unwrap();
            let ls = ls.clone();
            let sizes = sizes.clone();
            std::thread::spawn(move || {
                let src: Vec<Vec<u8>> = sizes.iter().map(|s| vec![7u8; s * lanes]).collect();
                for _ in 0..per {
                    let mut s = w.step().unwrap();
                    for (l, v) in ls.iter().zip(&src) {
                        if inplace {
                            s.view_mut(*l).as_slice_mut().unwrap().copy_from_slice(v);
                        } else {
                            s.put(*l, v).unwrap();
                        }
                    }
                    s.commit().unwrap();
                }
            })
        })
        .collect();
    let mut rows = 0;
    for b in learner.iter() {
        rows += b.unwrap().rows();
    }
    for h in hs {
        h.join().unwrap();
    }
    let s = t.elapsed().as_secs_f64();
    println!(
        "{bytes} B x{leaves} writers {writers} lanes {lanes} inplace {inplace}: {:.3} M rows/s {:.2} GB/s rows {rows} {:?}",
        rows as f64 / s / 1e6,
        rows as f64 * bytes as f64 / s / 1e9,
        feed.metrics().writer_blocked
    );
}
fn main() {
    let a: Vec<usize> = std::env::args().skip(1).map(|x| x.parse().unwrap()).collect();
    run(a[0], a[1], a[2], a[3], a[4] == 1, a[5]);
}

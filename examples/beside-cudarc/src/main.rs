//! Kernels that cudarc launches on batches that a feed brings, in one process. Needs a GPU.

use std::process::ExitCode;

const BATCHES: usize = 200;

fn main() -> ExitCode {
    if let Err(error) = pinring::probe_cuda(&pinring::CudaSearch::new()) {
        eprintln!("this example needs a GPU: {error}");
        return ExitCode::FAILURE;
    }
    match beside_cudarc::run(BATCHES) {
        Ok((found, expected)) if found == expected => {
            println!(
                "{BATCHES} batches: the totals that cudarc's kernel found are those of the rows that were written"
            );
            ExitCode::SUCCESS
        }
        Ok((found, expected)) => {
            let wrong = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
            eprintln!("{wrong} of {BATCHES} batches have another total than the rows that were written");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

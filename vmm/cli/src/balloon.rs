//! `driftline balloon`.

use std::process::ExitCode;

use driftline_control::model::{BalloonRequest, BalloonView};
use hyper::Method;

use super::args::BalloonArgs;
use super::client::ask;
use super::failure::Failure;
use super::output::{self, print, print_json};

/// Changes the balloon's size if the command line gives one, then shows the balloon.
pub(super) fn balloon(args: &BalloonArgs) -> Result<ExitCode, Failure> {
    let api = &args.query.api;
    if let Some(bytes) = args.size {
        if !bytes.is_multiple_of(1 << 20) {
            return Err(Failure::usage(format_args!(
                "--size is {bytes} bytes; give whole MiB, such as 256M"
            )));
        }
        let request = BalloonRequest { amount_mib: bytes >> 20 };
        ask::<()>(api, Method::PATCH, "/balloon", Some(&request))?;
    }
    let view: BalloonView = ask(api, Method::GET, "/balloon", None::<&()>)?;
    if args.query.json {
        print_json(&view)?;
    } else {
        print(output::table(&[
            ("target size", output::bytes(view.target_bytes)),
            ("actual size", output::bytes(view.actual_bytes)),
            ("returned so far", output::bytes(view.discarded_bytes)),
        ]))?;
    }
    Ok(ExitCode::SUCCESS)
}

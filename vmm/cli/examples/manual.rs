//! Writes the program's manual pages and shell completions, for packages:
//! `cargo run -p driftline-cli --example manual -- FOLDER`.
#![allow(dead_code, unused_imports, reason = "the program uses the rest")]

#[path = "../src/args/mod.rs"]
mod args;
#[path = "../src/values.rs"]
mod values;
#[path = "../src/version.rs"]
mod version;

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use clap::CommandFactory;
use clap_complete::{Shell, generate_to};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = env::args_os().nth(1).ok_or("usage: manual FOLDER")?;
    let folder = Path::new(&folder);
    let (pages, completions) = (folder.join("man"), folder.join("completions"));
    fs::create_dir_all(&pages)?;
    fs::create_dir_all(&completions)?;
    // `driftline help COMMAND` shows the same pages.
    let mut command = args::Cli::command().disable_help_subcommand(true);
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut command, "driftline", &completions)?;
    }
    clap_mangen::generate_to(command, &pages)?;
    Ok(())
}

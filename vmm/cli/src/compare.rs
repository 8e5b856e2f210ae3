//! Owns `driftline compare`: the meaning of its options, the checks before any machine is started,
//! and the destination of the report.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use driftline_compare::{
    CompareSettings, CompareStep, GuestKind, HostDescription, LIGHT, MatrixCell, TrackingWay,
    WayUnavailable, compare as measure, default_cells, product,
};
use driftline_machine::kvm::Capabilities;
use driftline_machine::sandbox;
use tempfile::NamedTempFile;

use super::args::CompareArgs;
use super::failure::Failure;
use super::output::{print, print_json, print_message};
use super::paths::directory_of;
use super::setup::enter_sandbox;
use super::status_line::StatusLine;
use super::version::version;

/// Time that a machine needs in addition to its measured time: launch, warm-up and end. Used only
/// for the estimate of the total time.
const OVERHEAD: Duration = Duration::from_millis(180);

/// Returns the command line as it was given, with the program's plain name.
fn command() -> String {
    let rest = std::env::args_os().skip(1);
    let arguments = rest.map(|arg| format!(" {}", arg.to_string_lossy()));
    std::iter::once("driftline".to_owned()).chain(arguments).collect()
}

impl CompareArgs {
    /// Returns the requested ways. `none` is always included, and last.
    fn ways(&self) -> Vec<TrackingWay> {
        let mut ways: Vec<TrackingWay> = Vec::new();
        let usual: Vec<TrackingWay> = TrackingWay::usual().collect();
        let requested = if self.modes.is_empty() { &usual } else { &self.modes };
        for way in requested.iter().filter(|way| way.tracks()) {
            if !ways.contains(way) {
                ways.push(*way);
            }
        }
        ways.push(TrackingWay::NONE);
        ways
    }

    fn cells(&self) -> Vec<MatrixCell> {
        let ways = self.ways();
        let mut guests: Vec<_> = self.guests.iter().cloned().map(GuestKind::Payload).collect();
        guests.extend(self.kernel.clone().map(GuestKind::Kernel));
        match (guests.is_empty(), self.mem.is_empty()) {
            (true, true) => default_cells(&ways),
            (true, false) => product(&ways, &[GuestKind::Payload(LIGHT.to_owned())], &self.mem),
            (false, true) => product(&ways, &guests, &[1 << 30]),
            (false, false) => product(&ways, &guests, &self.mem),
        }
    }

    fn settings(&self) -> CompareSettings {
        CompareSettings {
            interval: self.interval,
            duration: self.duration,
            repeat: self.repeat.into(),
            vcpus: self.vcpus,
            ring_entries: self.ring_entries,
            boot_time: self.boot_time,
        }
    }
}

/// `driftline compare`.
pub(super) fn compare(args: CompareArgs) -> Result<ExitCode, Failure> {
    let (cells, settings) = (args.cells(), args.settings());
    if settings.interval.is_zero() || settings.per_run() < settings.interval * 4 {
        return Err(Failure::usage(format_args!(
            "a run of {} ms ({} of them share --duration) has no room for four epochs of {} ms: \
             make --duration longer, or --interval shorter",
            settings.per_run().as_millis(),
            settings.repeat,
            settings.interval.as_millis()
        )));
    }
    let pages =
        [&args.html, &args.svg].map(|path| path.as_deref().map(ReportFile::new).transpose());
    let [html, svg] = pages;
    let (html, svg) = (html?, svg?);
    if let (Some(html), Some(svg)) = (&html, &svg)
        && html.destination == svg.destination
    {
        return Err(Failure::error(format_args!(
            "--html and --svg are the same file, {}: one would replace the other",
            html.destination.display()
        )));
    }
    // Files are renamed into place, so their directories must be writable.
    let directory = |report: &ReportFile| directory_of(&report.destination).to_owned();
    let directories = html.iter().chain(&svg).map(directory).collect();
    let capabilities = driftline_machine::doctor::usable_kvm().map_err(Failure::host_lacks)?;
    let host = HostDescription::describe();
    restrict(&args, directories)?;
    let measurable = measurable(&args.ways(), &cells, &settings, &capabilities);
    let mut progress = CompareProgress::new(&settings, measurable);
    let mut report = measure(&cells, &settings, &capabilities, host, |step| progress.show(step));
    report.command = Some(command());
    report.version = version().to_owned();
    drop(progress);
    // Print first: the measurements must not be lost if writing the files or stdout fails.
    let printed = match args.json {
        true => print_json(&report),
        false => print(report.table(args.wide)),
    };
    let html = html.map_or(Ok(()), |target| target.write(&report.html()));
    let svg = match (svg, report.memory_svg()) {
        (Some(target), Some(drawing)) => target.write(&drawing),
        (Some(target), None) => {
            print_message(format_args!(
                "{} is not written: no guest was measured with two memory sizes",
                target.path.display()
            ));
            Ok(())
        }
        (None, _) => Ok(()),
    };
    printed.and(html).and(svg)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns how many of `cells` this host can measure. Reports each way that the host lacks, with
/// the reason: its rows will have no figures.
fn measurable(
    ways: &[TrackingWay],
    cells: &[MatrixCell],
    settings: &CompareSettings,
    capabilities: &Capabilities,
) -> usize {
    let lacking = |way: &TrackingWay| way.lacking(capabilities, settings.ring_entries);
    let lacking: Vec<(&TrackingWay, WayUnavailable)> =
        ways.iter().filter_map(|way| Some((way, lacking(way)?))).collect();
    for (way, why) in &lacking {
        print_message(format_args!("{way} is not measured: {why}"));
    }
    cells.iter().filter(|cell| lacking.iter().all(|(way, _)| **way != cell.way)).count()
}

/// A file that is written completely or not at all. The constructor verifies, before anything is
/// measured, that its directory accepts files.
struct ReportFile {
    /// The path as given on the command line.
    path: PathBuf,
    /// The path after following links: a link remains, and the file it points to is replaced.
    destination: PathBuf,
    file: NamedTempFile,
}

impl ReportFile {
    fn new(path: &Path) -> Result<Self, Failure> {
        let refused = |why: &dyn std::fmt::Display| {
            Failure::error(format_args!("{} cannot be written: {why}", path.display()))
        };
        let Some(name) = path.file_name() else { return Err(refused(&"it is a directory")) };
        let destination = match fs::metadata(path) {
            Ok(there) if there.is_dir() => return Err(refused(&"it is a directory")),
            // A rename would replace a device or pipe with a regular file.
            Ok(there) if !there.is_file() => return Err(refused(&"it is not a regular file")),
            Ok(_) => path.canonicalize(),
            Err(e) if e.kind() == ErrorKind::NotFound && path.is_symlink() => {
                return Err(refused(&"it is a link to nothing"));
            }
            Err(e) if e.kind() == ErrorKind::NotFound => {
                directory_of(path).canonicalize().map(|directory| directory.join(name))
            }
            Err(e) => Err(e),
        };
        let destination = destination.map_err(|e| refused(&e))?;
        let file = tempfile::Builder::new()
            .prefix(".driftline-")
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
            .tempfile_in(directory_of(&destination));
        Ok(Self { path: path.to_owned(), destination, file: file.map_err(|e| refused(&e))? })
    }

    fn write(mut self, text: &str) -> Result<(), Failure> {
        let written =
            self.file.write_all(text.as_bytes()).and_then(|()| self.file.as_file().sync_all());
        let put = written.and_then(|()| self.file.persist(&self.destination).map_err(|e| e.error));
        put.map(drop).map_err(|e| {
            Failure::error(format_args!("{} cannot be written: {e}", self.path.display()))
        })
    }
}

/// Sandboxes the process, which has guests: drops everything that it will not need.
fn restrict(args: &CompareArgs, write: Vec<PathBuf>) -> Result<(), Failure> {
    let options = sandbox::SandboxOptions {
        seccomp: true,
        landlock: true,
        read: args.kernel.iter().cloned().collect(),
        write,
        ..sandbox::SandboxOptions::default()
    };
    enter_sandbox(&options)?;
    driftline_machine::log_thread::start()?;
    Ok(())
}

/// Shows progress on stderr: a bar on a terminal, otherwise an occasional line.
struct CompareProgress {
    line: StatusLine,
    last_message: Instant,
}

impl CompareProgress {
    /// Creates the progress display for this number of cells.
    fn new(settings: &CompareSettings, cells: usize) -> Self {
        let runs = cells * settings.repeat;
        let each = settings.per_run() + OVERHEAD;
        let takes = each.saturating_mul(u32::try_from(runs).unwrap_or(u32::MAX));
        print_message(format_args!(
            "{} machines, one after the other, in about {} s",
            runs,
            takes.as_secs().max(1)
        ));
        let line = StatusLine::bar();
        line.step(0, runs);
        Self { line, last_message: Instant::now() }
    }

    fn show(&mut self, step: CompareStep<'_>) {
        let cell = step.cell;
        let gib = cell.mem_bytes as f64 / (1u64 << 30) as f64;
        let what = format!("{}, {gib} GiB, {}", cell.way, cell.guest.name());
        if self.line.is_shown() {
            self.line.step(step.done, step.of);
            self.line.show(what);
        } else if self.last_message.elapsed() > Duration::from_secs(10) {
            self.last_message = Instant::now();
            print_message(format_args!("{} of {} measured, now {what}", step.done, step.of));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_and_devices_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        ReportFile::new(&link).unwrap().write("new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        let new = dir.path().join("sub/../new");
        fs::create_dir(dir.path().join("sub")).unwrap();
        assert_eq!(ReportFile::new(&new).unwrap().destination.file_name(), Some("new".as_ref()));
        std::os::unix::fs::symlink("nothing", dir.path().join("dangling")).unwrap();
        let why = |path: &Path| ReportFile::new(path).err().unwrap().message().to_owned();
        assert!(why(&dir.path().join("dangling")).contains("a link to nothing"));
        assert!(why(dir.path()).contains("it is a directory"));
        assert!(why(Path::new("/dev/null")).contains("it is not a regular file"));
    }
}

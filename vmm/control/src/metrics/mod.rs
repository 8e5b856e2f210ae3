//! Metrics in Prometheus' formats: what `info`, the jobs and the guest's timings count, read at
//! each scrape.
//!
//! All metrics of a process with a guest have the labels `vm_id` and, if the guest has a name,
//! `name`.

mod devices;
mod format;
mod guest;
mod jobs;
mod page;
mod process;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt;

use driftline_machine::vm::Timings;
use driftline_migrate::Progress;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, prometheus_text, text};
use prometheus_client::registry::Registry;

use self::devices::DeviceFigures;
use self::page::MetricsPage;
use self::process::ProcessFigures;
use crate::jobs::{CheckpointFigures, Jobs, MigrationFigures};
use crate::model::Info;
pub(crate) use format::Format;

/// The figures of one scrape.
#[derive(Debug)]
pub(crate) struct Scrape {
    process: ProcessFigures,
    guest: Option<Box<GuestFigures>>,
    /// The guest that arrives, or has arrived, from another host.
    received: Option<Progress>,
}

/// Figures of a guest and its jobs.
#[derive(Debug)]
struct GuestFigures {
    info: Info,
    timings: Timings,
    devices: DeviceFigures,
    checkpoints: CheckpointFigures,
    migrations: MigrationFigures,
}

impl Scrape {
    /// Reads all figures. Waits for no device and for no pause.
    pub(crate) fn read(jobs: Option<&Jobs>, received: Option<Progress>) -> Self {
        let guest = jobs.map(|jobs| {
            let vm = jobs.vm();
            Box::new(GuestFigures {
                info: jobs.info(),
                timings: vm.timings(),
                devices: DeviceFigures::read(&**vm),
                checkpoints: jobs.checkpoint_figures(),
                migrations: jobs.migration_figures(),
            })
        });
        Self { process: ProcessFigures::read(), guest, received }
    }

    /// Writes the page.
    ///
    /// # Errors
    ///
    /// None in practice: writing to a string cannot fail.
    pub(crate) fn write(self, format: Format) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_labels(self.labels().into_iter());
        registry.register_collector(Box::new(self));
        let mut page = String::new();
        match format {
            Format::OpenMetrics => text::encode(&mut page, &registry)?,
            Format::Text => prometheus_text::encode(&mut page, &registry)?,
        }
        Ok(page)
    }

    /// Returns the labels that all metrics have.
    fn labels(&self) -> Vec<(Cow<'static, str>, Cow<'static, str>)> {
        let Some(guest) = &self.guest else { return Vec::new() };
        let name = guest.info.name.as_ref().map(|name| ("name".into(), name.to_string().into()));
        let id = ("vm_id".into(), guest.info.vm_id.to_string().into());
        [id].into_iter().chain(name).collect()
    }
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = MetricsPage(encoder);
        self.process.write(&mut page)?;
        if let Some(guest) = &self.guest {
            guest::write(&mut page, &guest.info, &guest.timings)?;
            devices::write(&mut page, &guest.info.devices, &guest.devices)?;
            jobs::write_checkpoints(&mut page, &guest.info, &guest.checkpoints)?;
        }
        let sent = self.guest.as_ref().map(|guest| &guest.migrations);
        jobs::write_migrations(&mut page, sent, self.received.as_ref())
    }
}

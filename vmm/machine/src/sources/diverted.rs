//! A source whose frames go to another set than the tracker's trees. The wrapped source still
//! decides what it catches and when it write-protects.

use driftline_dirty_tracker::Tracker;
use driftline_guest::CollectionReport;

use super::source::{DirtySource, SourceError};
use super::{BitmapSource, RingSource};
use crate::measure::{FrameSink, SharedSink};
use crate::tracking::TrackingMode;

/// Wraps `source` and delivers its frames to `sink`.
#[derive(Debug)]
pub(crate) struct Diverted<S> {
    source: S,
    sink: SharedSink,
}

impl<S> Diverted<S> {
    pub(crate) fn new(source: S, sink: SharedSink) -> Self {
        Self { source, sink }
    }
}

/// A source whose frames can go to a sink.
pub(crate) trait Divert: DirtySource {
    /// Collects like [`DirtySource::collect`], into `sink`.
    fn collect_into(&mut self, sink: &SharedSink) -> Result<CollectionReport, SourceError>;
}

impl Divert for RingSource {
    fn collect_into(&mut self, sink: &SharedSink) -> Result<CollectionReport, SourceError> {
        self.collect_by(|frames| {
            let mut sink = sink.lock();
            let absorbed = match &mut *sink {
                FrameSink::List(list) => frames.for_each(|slot, offset| list.insert(slot, offset)),
                FrameSink::Flat(flat) => frames.for_each(|slot, offset| flat.insert(slot, offset)),
            };
            if absorbed.marked_all {
                sink.insert_all();
            }
            absorbed
        })
    }
}

impl Divert for BitmapSource {
    fn collect_into(&mut self, sink: &SharedSink) -> Result<CollectionReport, SourceError> {
        let collected = self.collect_by(|slot, bitmap| {
            let mut sink = sink.lock();
            sink.insert_bitmap(slot, bitmap).inspect_err(|_| sink.insert_all())
        });
        collected.inspect_err(|_| sink.lock().insert_all())
    }
}

impl<S: Divert> DirtySource for Diverted<S> {
    fn mode(&self) -> TrackingMode {
        self.source.mode()
    }

    fn start(&mut self) -> Result<(), SourceError> {
        self.source.start()
    }

    fn stop(&mut self) -> Result<(), SourceError> {
        self.source.stop()
    }

    fn collect(&mut self, _: &Tracker) -> Result<CollectionReport, SourceError> {
        self.source.collect_into(&self.sink)
    }

    fn dirtied(&self) -> &[u64] {
        self.source.dirtied()
    }

    fn harvested(&self) -> &[u64] {
        self.source.harvested()
    }
}

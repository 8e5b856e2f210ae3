//! Writes metric families one by one. Names, help texts and units are given where the values are.

use std::fmt;

use driftline_machine::histogram::Distribution;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

/// The labels of a metric that has no labels besides its guest's.
pub(super) const NONE: [(&str, &str); 0] = [];

/// A page that is being written. A family without samples is skipped.
pub(super) struct MetricsPage<'e>(pub(super) DescriptorEncoder<'e>);

/// The name of a family, without the suffixes of its unit and its type, its unit and its help text.
pub(super) struct Family {
    name: &'static str,
    unit: Option<Unit>,
    help: &'static str,
}

/// Describes a family without a unit.
pub(super) fn number(name: &'static str, help: &'static str) -> Family {
    Family { name, unit: None, help }
}

/// Describes a family of sizes; its name gets the suffix `_bytes`.
pub(super) fn bytes(name: &'static str, help: &'static str) -> Family {
    Family { name, unit: Some(Unit::Bytes), help }
}

/// Describes a family of times; its name gets the suffix `_seconds`.
pub(super) fn seconds(name: &'static str, help: &'static str) -> Family {
    Family { name, unit: Some(Unit::Seconds), help }
}

impl MetricsPage<'_> {
    /// Writes counters; the name gets the suffix `_total`.
    pub(super) fn counters<L: EncodeLabelSet, V: EncodeCounterValue>(
        &mut self,
        Family { name, unit, help }: Family,
        samples: impl IntoIterator<Item = (L, V)>,
    ) -> fmt::Result {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return Ok(());
        }
        let kind = MetricType::Counter;
        let mut family = self.0.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for (labels, value) in samples {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)?;
        }
        Ok(())
    }

    /// Writes gauges.
    pub(super) fn gauges<L: EncodeLabelSet, V: EncodeGaugeValue>(
        &mut self,
        Family { name, unit, help }: Family,
        samples: impl IntoIterator<Item = (L, V)>,
    ) -> fmt::Result {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return Ok(());
        }
        let kind = MetricType::Gauge;
        let mut family = self.0.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for (labels, value) in samples {
            family.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    /// Writes a counter without labels of its own, if it has a value.
    pub(super) fn counter<V: EncodeCounterValue>(
        &mut self,
        family: Family,
        value: Option<V>,
    ) -> fmt::Result {
        self.counters(family, value.map(|value| (NONE, value)))
    }

    /// Writes a gauge without labels of its own, if it has a value.
    pub(super) fn gauge<V: EncodeGaugeValue>(
        &mut self,
        family: Family,
        value: Option<V>,
    ) -> fmt::Result {
        self.gauges(family, value.map(|value| (NONE, value)))
    }

    /// Writes a histogram of times, if there is one.
    pub(super) fn times(
        &mut self,
        Family { name, unit, help }: Family,
        times: Option<&Distribution>,
    ) -> fmt::Result {
        let Some(times) = times else { return Ok(()) };
        let kind = MetricType::Histogram;
        let mut family = self.0.encode_descriptor(name, help, unit.as_ref(), kind)?;
        family.encode_histogram::<NoLabelSet>(times.sum_s, times.count(), &times.buckets, None)
    }

    /// Writes labels as a metric of the value 1; the name gets the suffix `_info`.
    pub(super) fn info(
        &mut self,
        Family { name, unit, help }: Family,
        labels: &impl EncodeLabelSet,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Info)?;
        family.encode_info(labels)
    }
}

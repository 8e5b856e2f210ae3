//! Chooses between the two text formats.

/// A text format of metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' own format, version 0.0.4, which every collector reads.
    Text,
}

impl Format {
    /// Chooses the format by the `Accept` header of a request: OpenMetrics only for clients that
    /// ask for it by name and do not prefer plain text.
    pub(crate) fn accepted(header: &str) -> Self {
        let (mut open_metrics, mut text) = (0.0, 0.0);
        for range in header.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            // The default of HTTP is 1. A weight that is not a number is ignored.
            let weight = parts.find_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok());
            let weight = weight.unwrap_or(1.0);
            if kind.eq_ignore_ascii_case("application/openmetrics-text") {
                open_metrics = weight.max(open_metrics);
            } else if kind.eq_ignore_ascii_case("text/plain") {
                text = weight.max(text);
            }
        }
        if open_metrics > 0.0 && open_metrics >= text { Self::OpenMetrics } else { Self::Text }
    }

    /// Returns the format's content type.
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => prometheus_client::encoding::prometheus_text::CONTENT_TYPE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_only_for_clients_that_prefer_it() {
        // What Prometheus 2 sends.
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;\
                          version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for header in [prometheus, "application/openmetrics-text", "Application/OpenMetrics-Text"] {
            assert_eq!(Format::accepted(header), Format::OpenMetrics, "{header}");
        }
        let others = [
            "",
            "*/*",
            "text/plain",
            "application/json",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=0.2,text/plain;q=0.3",
        ];
        for header in others {
            assert_eq!(Format::accepted(header), Format::Text, "{header}");
        }
    }
}

//! Owns the conversation of `top` with a driftline: it begins a watch as soon as there is a guest,
//! and asks for one window after another.

use std::time::Duration;

use driftline_control::api::{Client, ClientError};
use driftline_control::model::{
    ArrivingInfo, InfoPage, MAX_BINS, WatchBegun, WatchPage, WatchRequest,
};
use hyper::Method;

/// How long the end of a watch may take to be told; it ends by itself, too.
const FAREWELL: Duration = Duration::from_secs(1);

/// What has been answered.
pub(super) enum Update {
    /// A window; the guest may have ended.
    Page(Box<WatchPage>),
    /// There is no guest yet: how far it is.
    Arriving(Box<ArrivingInfo>),
}

/// See the module.
pub(super) struct Feed {
    client: Client,
    watch: Option<u64>,
    /// A guest has been asked for: it is not asked for again at once.
    asked: bool,
}

impl Feed {
    /// Nothing is asked yet.
    pub(super) fn new(client: Client) -> Self {
        Self { client, watch: None, asked: false }
    }

    /// The next window, of `interval`.
    pub(super) async fn next(&mut self, interval: Duration) -> Result<Update, ClientError> {
        if let Some(watch) = self.watch {
            match self.ask(watch, interval).await {
                // Who was stopped for a while is no longer waited for, and begins anew.
                Err(ClientError::Fault(_)) => self.watch = None,
                answer => return answer,
            }
        }
        match self.begin(interval).await? {
            Ok(watch) => self.ask(watch, interval).await,
            Err(arriving) => Ok(Update::Arriving(Box::new(arriving))),
        }
    }

    async fn ask(&mut self, watch: u64, interval: Duration) -> Result<Update, ClientError> {
        let path = format!("/dirty/watch?watch={watch}&wait_ms={}", interval.as_millis());
        let page: WatchPage = self.client.get(&path).await?;
        if page.end.is_some() {
            self.watch = None;
        }
        Ok(Update::Page(Box::new(page)))
    }

    /// Begins a watch, or says how far a guest is that is still to come.
    async fn begin(
        &mut self,
        interval: Duration,
    ) -> Result<Result<u64, ArrivingInfo>, ClientError> {
        if std::mem::replace(&mut self.asked, true) {
            tokio::time::sleep(interval).await;
        }
        match self.post().await {
            Err(ClientError::Fault(_)) => match self.client.get("/info").await? {
                InfoPage::Arriving(info) => Ok(Err(info)),
                // It may have come in between.
                InfoPage::Guest(_) => self.post().await.map(Ok),
            },
            begun => begun.map(Ok),
        }
    }

    async fn post(&mut self) -> Result<u64, ClientError> {
        let request = WatchRequest { bins: Some(MAX_BINS) };
        let begun = self.client.call(Method::POST, "/dirty/watch", Some(&request)).await;
        let WatchBegun { watch } = begun?;
        self.watch = Some(watch);
        Ok(watch)
    }

    /// Nobody looks any more.
    pub(super) async fn end(self) {
        let Some(watch) = self.watch else { return };
        let path = format!("/dirty/watch?watch={watch}");
        let told = self.client.call::<()>(Method::DELETE, &path, None::<&()>);
        // Where it cannot be told it ends by itself.
        let _ = tokio::time::timeout(FAREWELL, told).await;
    }
}

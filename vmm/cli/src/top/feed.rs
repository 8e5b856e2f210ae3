//! Owns `top`'s requests to a VMM: starts a watch as soon as there is a guest, and requests one
//! window after another.

use std::time::Duration;

use driftline_control::api::{Client, ClientError};
use driftline_control::model::{
    ArrivingInfo, InfoPage, MAX_BINS, WatchPage, WatchRequest, WatchStarted,
};
use hyper::Method;

/// Limit for the request that ends a watch. Without that request the watch ends by itself.
const END_LIMIT: Duration = Duration::from_secs(1);

/// Upper bound on watches that are begun anew for one window. The guest may change its process at
/// each.
const MAX_RENEWALS: u32 = 3;

/// An answer.
pub(super) enum Update {
    /// A window. The guest may have ended.
    Page(Box<WatchPage>),
    /// There is no guest yet; contains the progress of its arrival.
    Arriving(Box<ArrivingInfo>),
}

/// A client that requests the windows of a guest.
pub(super) struct Feed {
    client: Client,
    watch: Option<u64>,
    /// Whether the feed has already asked for a guest, so that it does not ask again immediately.
    has_asked: bool,
}

impl Feed {
    /// Creates a feed that has sent no request yet.
    pub(super) fn new(client: Client) -> Self {
        Self { client, watch: None, has_asked: false }
    }

    /// Returns the next window, whose length is `interval`.
    pub(super) async fn next(&mut self, interval: Duration) -> Result<Update, ClientError> {
        let mut renewals = 0;
        loop {
            let watch = match self.watch {
                Some(watch) => watch,
                None => match self.begin(interval).await? {
                    Ok(watch) => watch,
                    Err(arriving) => return Ok(Update::Arriving(Box::new(arriving))),
                },
            };
            match self.ask(watch, interval).await {
                // The server has ended the watch of a client that was stopped for a while, or the
                // guest has changed its process.
                Err(ClientError::Fault(_)) if renewals < MAX_RENEWALS => {
                    renewals += 1;
                    self.watch = None;
                }
                answer => return answer,
            }
        }
    }

    async fn ask(&mut self, watch: u64, interval: Duration) -> Result<Update, ClientError> {
        let path = format!("/v1/dirty/watch?watch={watch}&wait_ms={}", interval.as_millis());
        let page: WatchPage = self.client.get(&path).await?;
        if page.end.is_some() {
            self.watch = None;
        }
        Ok(Update::Page(Box::new(page)))
    }

    /// Begins a watch, or returns the progress of a guest that has not arrived yet.
    async fn begin(
        &mut self,
        interval: Duration,
    ) -> Result<Result<u64, ArrivingInfo>, ClientError> {
        if std::mem::replace(&mut self.has_asked, true) {
            tokio::time::sleep(interval).await;
        }
        match self.post().await {
            Err(ClientError::Fault(_)) => match self.client.get("/v1/info").await? {
                InfoPage::Arriving(info) => Ok(Err(info)),
                // The guest may have arrived between the two requests.
                InfoPage::Guest(_) => self.post().await.map(Ok),
            },
            begun => begun.map(Ok),
        }
    }

    async fn post(&mut self) -> Result<u64, ClientError> {
        let request = WatchRequest { bins: Some(MAX_BINS) };
        let begun = self.client.call(Method::POST, "/v1/dirty/watch", Some(&request)).await;
        let WatchStarted { watch } = begun?;
        self.watch = Some(watch);
        Ok(watch)
    }

    /// Ends the watch.
    pub(super) async fn end(self) {
        let Some(watch) = self.watch else { return };
        let path = format!("/v1/dirty/watch?watch={watch}");
        let ended = self.client.call::<()>(Method::DELETE, &path, None::<&()>);
        // If the request fails, the watch ends by itself.
        let _ = tokio::time::timeout(END_LIMIT, ended).await;
    }
}

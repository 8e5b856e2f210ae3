//! Tokens of sessions. A token says until when it is valid, and proves that this process issued it,
//! so no token is kept.
//!
//! ```text
//! hexadecimal digits of:  expiry, ms (8 bytes) | serial number (8 bytes) | HMAC-SHA-256 (16 bytes)
//! ```

use std::io;
use std::ops::RangeInclusive;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;

/// Valid lifetimes, in seconds.
pub(super) const LIFETIMES_S: RangeInclusive<u32> = 1..=21_600;

const KEY_BYTES: usize = 32;
/// Bytes of the expiry and of the serial number, which are authenticated.
const BODY_BYTES: usize = 16;
const TAG_BYTES: usize = 16;
const TOKEN_BYTES: usize = BODY_BYTES + TAG_BYTES;

/// Issues tokens, and recognizes them. A clone of the guest has another key.
#[derive(Default)]
pub(super) struct TokenIssuer {
    /// `None` until it is needed.
    key: Option<[u8; KEY_BYTES]>,
    /// Number of tokens that were issued.
    issued: u64,
}

impl TokenIssuer {
    /// Issues a token that is valid for `lifetime` from `now`, a time of a monotonic clock.
    ///
    /// # Errors
    ///
    /// The host has no randomness.
    pub(super) fn issue(&mut self, lifetime: Duration, now: Duration) -> io::Result<String> {
        let key = match self.key {
            Some(key) => key,
            None => *self.key.insert(random_key()?),
        };
        self.issued += 1;
        let expiry = u64::try_from((now + lifetime).as_millis()).unwrap_or(u64::MAX);
        let mut body = [0; BODY_BYTES];
        body[..8].copy_from_slice(&expiry.to_be_bytes());
        body[8..].copy_from_slice(&self.issued.to_be_bytes());
        let tag = mac(&key, &body).finalize().into_bytes();
        Ok(body.iter().chain(&tag[..TAG_BYTES]).map(|byte| format!("{byte:02x}")).collect())
    }

    /// Returns whether `token` was issued here and is valid at `now`.
    pub(super) fn is_valid(&self, token: &str, now: Duration) -> bool {
        let (Some(key), Some(bytes)) = (self.key, decode(token)) else { return false };
        let (body, tag) = bytes.split_at(BODY_BYTES);
        let mut expiry = [0; 8];
        expiry.copy_from_slice(&body[..8]);
        mac(&key, body).verify_truncated_left(tag).is_ok()
            && u128::from(u64::from_be_bytes(expiry)) > now.as_millis()
    }
}

fn mac(key: &[u8; KEY_BYTES], body: &[u8]) -> Hmac<Sha256> {
    let mut block = [0; 64];
    block[..KEY_BYTES].copy_from_slice(key);
    // A key that is shorter than a block is filled with zeros.
    let mut mac = Hmac::<Sha256>::new(&block.into());
    mac.update(body);
    mac
}

fn random_key() -> io::Result<[u8; KEY_BYTES]> {
    let mut key = [0; KEY_BYTES];
    // A read of at most 256 bytes is never short once the kernel has randomness.
    let bytes = getrandom(&mut key, GetRandomFlags::empty())?;
    match bytes == KEY_BYTES {
        true => Ok(key),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Returns the bytes of a token's digits.
fn decode(token: &str) -> Option<[u8; TOKEN_BYTES]> {
    let digits = token.as_bytes();
    if digits.len() != 2 * TOKEN_BYTES {
        return None;
    }
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; TOKEN_BYTES];
    for (byte, digits) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(digits[0])? << 4 | digit(digits[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn token_is_valid_until_it_expires() {
        let mut issuer = TokenIssuer::default();
        let start = 100 * SECOND;
        let token = issuer.issue(2 * SECOND, start).unwrap();
        assert!(token.len() == 64 && token.bytes().all(|b| b.is_ascii_hexdigit()), "{token}");
        assert!(issuer.is_valid(&token, start));
        assert!(issuer.is_valid(&token, start + 2 * SECOND - Duration::from_millis(1)));
        assert!(!issuer.is_valid(&token, start + 2 * SECOND));
        assert_ne!(issuer.issue(2 * SECOND, start).unwrap(), token);
    }

    #[test]
    fn changed_or_foreign_token_is_refused() {
        let mut issuer = TokenIssuer::default();
        assert!(!issuer.is_valid(&"0".repeat(64), Duration::ZERO), "there is no key yet");
        let token = issuer.issue(SECOND, Duration::ZERO).unwrap();
        let foreign = TokenIssuer::default().issue(SECOND, Duration::ZERO).unwrap();
        assert!(!issuer.is_valid(&foreign, Duration::ZERO));
        for at in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[at] = if changed[at] == b'0' { b'1' } else { b'0' };
            assert!(!issuer.is_valid(str::from_utf8(&changed).unwrap(), Duration::ZERO), "{at}");
        }
        for other in [&token[1..], "", &token.to_uppercase(), &format!("{token}0"), "\u{e9}"] {
            let is_same = other == token;
            assert!(is_same || !issuer.is_valid(other, Duration::ZERO), "{other}");
        }
    }
}

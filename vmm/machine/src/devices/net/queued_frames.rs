//! Frames that arrived for a guest after its state was saved. They wait in its tap and are sent
//! along to the next host, whose driver gets them first.

use std::collections::VecDeque;

use super::frame::{HEADER, MAX_FRAME};
use super::tap::Tap;
use crate::codec::{self, DecodeError};
use crate::devices::error::StateError;
use crate::devices::misfit::DeviceMisfit;

/// Most frames of each queue pair that are sent along. This is more than a tap holds, unless its
/// queue was made longer.
const MAX_FRAMES: usize = 1024;
/// Most bytes of frames that are kept, of all pairs together. This is more than is sent along: a
/// guest that stays after all gets all of them.
const MAX_BYTES: usize = 1 << 20;
/// Encoded bytes of a frame besides its data: queue pair and length.
const FRAME_OVERHEAD: usize = 4;
/// Encoded bytes before the first frame: the number of frames.
const COUNT_BYTES: usize = 3;

/// Frames with their headers and queue pairs, in order within each pair.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct QueuedFrames(VecDeque<(u8, Vec<u8>)>);

impl QueuedFrames {
    /// Removes and returns the next frame for `pair`.
    pub(super) fn pop(&mut self, pair: u8) -> Option<Vec<u8>> {
        let i = self.0.iter().position(|(of, _)| *of == pair)?;
        Some(self.0.remove(i)?.1)
    }

    /// Drops the frames of all pairs except the first `pairs`.
    pub(super) fn retain_pairs(&mut self, pairs: u8) {
        self.0.retain(|(pair, _)| *pair < pairs);
    }

    /// Reads the frames that wait in `tap` through `buffer` and adds them, up to [`MAX_BYTES`]
    /// bytes, shared evenly among its pairs. Returns whether frames were lost: there were more, or
    /// some could not be read.
    pub(super) fn read_from(&mut self, tap: &Tap, buffer: &mut [u8]) -> bool {
        let mut more = false;
        for pair in 0..tap.enabled() {
            // Frames from earlier moves that failed may still be here.
            let lengths = self.0.iter().filter(|(of, _)| *of == pair).map(|(_, frame)| frame.len());
            let (before, bytes) = lengths.fold((0, 0), |(n, sum), len| (n + 1, sum + len));
            let mut room = (MAX_BYTES / usize::from(tap.enabled())).saturating_sub(bytes);
            for taken in before..=MAX_FRAMES {
                match tap.read(pair, buffer) {
                    Ok(None) => break,
                    // The frame has already been read, so it is lost.
                    Ok(Some(len)) if taken == MAX_FRAMES || len > room => {
                        more = true;
                        break;
                    }
                    Ok(Some(len)) => {
                        room -= len;
                        if len >= HEADER {
                            self.0.push_back((pair, buffer[..len].to_vec()));
                        }
                    }
                    // The kernel has dropped a frame. Others may follow it.
                    Err(_) => more = true,
                }
            }
        }
        more
    }

    /// Encodes the first frames that fit into `room` bytes. Returns no bytes if there are none.
    pub(super) fn encode(&self, room: usize) -> Result<Vec<u8>, StateError> {
        let mut left = room.saturating_sub(COUNT_BYTES);
        let fits = |(_, frame): &&(u8, Vec<u8>)| {
            let taken = left.checked_sub(FRAME_OVERHEAD + frame.len());
            left = taken.unwrap_or(0);
            taken.is_some()
        };
        let frames: Vec<_> = self.0.iter().take_while(fits).collect();
        match frames.is_empty() {
            true => Ok(Vec::new()),
            false => postcard::to_stdvec(&frames).map_err(StateError::Encode),
        }
    }

    /// Decodes the bytes that [`encode`](Self::encode) returned, for an interface that uses `pairs`
    /// pairs.
    pub(super) fn decode(bytes: &[u8], pairs: u8) -> Result<Self, StateError> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        // A sequence begins with its length, which is checked before anything is allocated for it.
        let (count, _) = postcard::take_from_bytes::<usize>(bytes).map_err(DecodeError::from)?;
        let most = MAX_FRAMES * usize::from(pairs);
        if count > most {
            return Err(DeviceMisfit::QueuedFrames { count, most }.into());
        }
        let frames: VecDeque<(u8, Vec<u8>)> = codec::decode(bytes)?;
        for (pair, frame) in &frames {
            let bytes = frame.len();
            if *pair >= pairs || !(HEADER..=MAX_FRAME).contains(&bytes) {
                return Err(DeviceMisfit::QueuedFrame { bytes, pair: *pair, pairs }.into());
            }
        }
        Ok(Self(frames))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames_of(lens: &[(u8, usize)]) -> QueuedFrames {
        QueuedFrames(lens.iter().map(|(pair, len)| (*pair, vec![*pair; *len])).collect())
    }

    #[test]
    fn encoded_frames_fit_and_decode() {
        let all = frames_of(&[(0, HEADER), (1, 200), (0, MAX_FRAME), (1, 20_000)]);
        for room in [0, 1, 100, 300, MAX_FRAME, MAX_FRAME + 300, 2 * MAX_FRAME] {
            let bytes = all.encode(room).unwrap();
            assert!(bytes.len() <= room, "{} in {room}", bytes.len());
            let back = QueuedFrames::decode(&bytes, 2).unwrap();
            assert!(back.0.iter().eq(all.0.iter().take(back.0.len())));
        }
        assert_eq!(QueuedFrames::decode(&all.encode(1 << 20).unwrap(), 2).unwrap(), all);
        assert_eq!(QueuedFrames::default().encode(1 << 20).unwrap(), Vec::<u8>::new());
    }

    #[test]
    fn each_pair_has_its_frames_in_order() {
        let mut all = QueuedFrames([(0, vec![1]), (1, vec![2]), (0, vec![3]), (2, vec![4])].into());
        all.retain_pairs(2);
        assert_eq!(all.pop(2), None);
        assert_eq!(all.pop(0), Some(vec![1]));
        assert_eq!(all.pop(0), Some(vec![3]));
        assert_eq!(all.pop(0), None);
        assert_eq!(all.pop(1), Some(vec![2]));
    }

    #[test]
    fn hostile_bytes_are_refused() {
        let refused = |frames: &[(u8, Vec<u8>)]| {
            QueuedFrames::decode(&postcard::to_stdvec(frames).unwrap(), 2).unwrap_err().to_string()
        };
        assert!(refused(&[(2, vec![0; 100])]).contains("pair 2 of 2"));
        assert!(refused(&[(0, vec![0; HEADER - 1])]).contains("bytes is queued"));
        assert!(refused(&[(0, vec![0; MAX_FRAME + 1])]).contains("bytes is queued"));
        assert!(refused(&vec![(0, vec![0; HEADER]); 2 * MAX_FRAMES + 1]).contains("more than"));
        QueuedFrames::decode(&[0xff; 9], 2).unwrap_err();
        let followed = [frames_of(&[(0, HEADER)]).encode(100).unwrap(), vec![0]].concat();
        assert!(
            QueuedFrames::decode(&followed, 2).unwrap_err().to_string().contains("1 bytes follow")
        );
    }
}

/*
 * The disk checker's log: fixed blocks of 4096 bytes, little-endian, in a file or a block device.
 *
 *   block 0               header: magic "DLDSKLOG", version, run, slots, CRC-32C
 *   block 1 + (n-1)%slots record n, for n = 1, 2, ...
 *
 * A record holds magic "DLDSKREC", the run's number, n, the number of the last record known to be
 * flushed when it was written, a CRC-32C of the whole block, and a body that run and n determine.
 * The log is a ring: record n + slots replaces record n.
 */
#ifndef DRIFTLINE_RECORD_H
#define DRIFTLINE_RECORD_H

#include <stdbool.h>
#include <stdint.h>

enum { BLOCK_BYTES = 4096 };
/* Largest number of records between two flushes, and so of records that a crash may tear. */
enum { BATCH_MOST = 8 };

struct log_header {
    uint64_t run, slots;
};

struct record {
    uint64_t run, number, flushed;
};

void header_encode(unsigned char *block, const struct log_header *header);
bool header_decode(const unsigned char *block, struct log_header *header);

void record_encode(unsigned char *block, const struct record *record);
/* Returns whether the block is, byte for byte, a record of `run`; `*record` then says which. */
bool record_decode(const unsigned char *block, uint64_t run, struct record *record);

/* Returns the byte offset of record `number`, which is at least 1. */
uint64_t record_offset(uint64_t number, uint64_t slots);
/* Returns the newest record up to `flushed` that belongs in `slot`; 0 if there was none yet. */
uint64_t record_due(uint64_t slot, uint64_t slots, uint64_t flushed);

enum slot_verdict {
    SLOT_GOOD,     /* the expected record, or a newer one in flight */
    SLOT_TORN,     /* unreadable, but an unflushed record was in flight there */
    SLOT_LOST,     /* an older record, or none: a flushed write is lost */
    SLOT_AHEAD,    /* a record that cannot have been written yet */
};
/*
 * Checks the content of slot `slot` (`number`, 0 if unreadable) in a log that is flushed up to
 * `flushed`.
 */
enum slot_verdict slot_judge(uint64_t slot, uint64_t slots, uint64_t number, uint64_t flushed);

#endif

/*
 * The disk checker's log: fixed blocks of 4096 bytes, little-endian, in a file or a block device.
 *
 *   block 0               header: magic "DLDSKLOG", version, run, slots, CRC-32C
 *   block 1 + (n-1)%slots record n, for n = 1, 2, ...
 *
 * A record holds magic "DLDSKREC", the run's number, n, the number of the last record known to be flushed when it was
 * written, a CRC-32C of the whole block, and a body that run and n determine. The log is a ring: record n + slots
 * replaces record n.
 */
#ifndef DRIFTLINE_RECORD_H
#define DRIFTLINE_RECORD_H

#include <stdbool.h>
#include <stdint.h>

enum { BLOCK_BYTES = 4096 };
/* The most records between two flushes, so the most that a crash may tear. */
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
/* Whether the block is, byte for byte, a record of `run`; then `*record` says which. */
bool record_decode(const unsigned char *block, uint64_t run, struct record *record);

/* Byte offset of record `number`, which is at least 1. */
uint64_t record_offset(uint64_t number, uint64_t slots);
/* The newest record up to `flushed` whose place is `slot`; 0 if there was none yet. */
uint64_t record_due(uint64_t slot, uint64_t slots, uint64_t flushed);

enum slot_verdict {
    SLOT_GOOD,     /* holds the record that must be there, or a newer one that was on its way */
    SLOT_TORN,     /* unreadable, but a record that nobody promised was on its way there */
    SLOT_LOST,     /* an older record, or none: a flushed write is gone */
    SLOT_AHEAD,    /* a record that could not have been written yet */
};
/* Judges what slot `slot` holds (`number`, 0 for nothing readable) in a log flushed up to `flushed`. */
enum slot_verdict slot_judge(uint64_t slot, uint64_t slots, uint64_t number, uint64_t flushed);

#endif

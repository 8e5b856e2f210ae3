/* Encodes, decodes and checks the blocks of the disk checker's log; record.h has the layout. */
#include "record.h"

#include "check.h"

#include <string.h>

static const char HEADER_MAGIC[8] = "DLDSKLOG", RECORD_MAGIC[8] = "DLDSKREC";
static const uint64_t VERSION = 1;

/*
 * Positions of the fields, in words of 8 bytes. The checksum is the last word of the head; the rest
 * is the body.
 */
enum {
    MAGIC = 0,
    HEADER_VERSION = 1,
    HEADER_RUN = 2,
    HEADER_SLOTS = 3,
    RUN = 1,
    NUMBER = 2,
    FLUSHED = 3,
    CHECKSUM = 4,
    BODY = 5,
};

static void put(unsigned char *block, int word, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        block[word * 8 + i] = (unsigned char)(value >> 8 * i);
}

static uint64_t get(const unsigned char *block, int word)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value |= (uint64_t)block[word * 8 + i] << 8 * i;
    return value;
}

/* The checksum covers the entire block except itself. */
static uint64_t checksum(const unsigned char *block)
{
    return crc32c(crc32c(0, block, CHECKSUM * 8), block + BODY * 8, BLOCK_BYTES - BODY * 8);
}

static bool sound(const unsigned char *block, const char *magic)
{
    return memcmp(block, magic, 8) == 0 && get(block, CHECKSUM) == checksum(block);
}

void header_encode(unsigned char *block, const struct log_header *header)
{
    memset(block, 0, BLOCK_BYTES);
    memcpy(block, HEADER_MAGIC, 8);
    put(block, HEADER_VERSION, VERSION);
    put(block, HEADER_RUN, header->run);
    put(block, HEADER_SLOTS, header->slots);
    put(block, CHECKSUM, checksum(block));
}

bool header_decode(const unsigned char *block, struct log_header *header)
{
    header->run = get(block, HEADER_RUN);
    header->slots = get(block, HEADER_SLOTS);
    return sound(block, HEADER_MAGIC) && get(block, HEADER_VERSION) == VERSION && header->slots > 0;
}

static uint64_t body_seed(uint64_t run, uint64_t number)
{
    return scramble(run) ^ number;
}

void record_encode(unsigned char *block, const struct record *record)
{
    uint64_t state = body_seed(record->run, record->number);
    memcpy(block, RECORD_MAGIC, 8);
    put(block, RUN, record->run);
    put(block, NUMBER, record->number);
    put(block, FLUSHED, record->flushed);
    for (int word = BODY; word < BLOCK_BYTES / 8; word++)
        put(block, word, random_next(&state));
    put(block, CHECKSUM, checksum(block));
}

bool record_decode(const unsigned char *block, uint64_t run, struct record *record)
{
    record->run = get(block, RUN);
    record->number = get(block, NUMBER);
    record->flushed = get(block, FLUSHED);
    if (!sound(block, RECORD_MAGIC) || record->run != run || record->number == 0)
        return false;
    uint64_t state = body_seed(run, record->number);
    for (int word = BODY; word < BLOCK_BYTES / 8; word++) {
        if (get(block, word) != random_next(&state))
            return false;
    }
    return true;
}

uint64_t record_offset(uint64_t number, uint64_t slots)
{
    return (1 + (number - 1) % slots) * BLOCK_BYTES;
}

uint64_t record_due(uint64_t slot, uint64_t slots, uint64_t flushed)
{
    uint64_t first = slot + 1;
    return flushed < first ? 0 : first + (flushed - first) / slots * slots;
}

enum slot_verdict slot_judge(uint64_t slot, uint64_t slots, uint64_t number, uint64_t flushed)
{
    uint64_t due = record_due(slot, slots, flushed);
    uint64_t next = due ? due + slots : slot + 1;
    bool under_way = next - flushed <= BATCH_MOST;
    if (number == due)
        return SLOT_GOOD;
    if (number == 0)
        return under_way ? SLOT_TORN : SLOT_LOST;
    if (number == next && under_way)
        return SLOT_GOOD;
    return number < due ? SLOT_LOST : SLOT_AHEAD;
}

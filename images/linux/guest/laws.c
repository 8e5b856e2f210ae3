/*
 * Tests of the checkers' data formats and verdicts. build.sh runs them before it publishes the
 * binary.
 */
#include "check.h"
#include "disk.h"
#include "message.h"
#include "page.h"
#include "record.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CASES = 2000 };

static const char *law;
static uint64_t state = 1;

static void hold(bool holds, int line)
{
    if (holds)
        return;
    fprintf(stderr, "laws.c:%d: '%s' does not hold\n", line, law);
    exit(EXIT_FAILED);
}
#define HOLDS(condition) hold(condition, __LINE__)

static uint64_t below(uint64_t bound)
{
    return random_next(&state) % bound;
}

static void flip(void *bytes, uint64_t bit)
{
    ((unsigned char *)bytes)[bit / 8] ^= (unsigned char)(1 << bit % 8);
}

static void the_checksum_is_crc32c(void)
{
    HOLDS(crc32c(0, "123456789", 9) == 0xe3069283);
    HOLDS(crc32c(crc32c(0, "1234", 4), "56789", 5) == 0xe3069283);
}

static void numbers_have_their_units(void)
{
    uint64_t value;
    HOLDS(number_read("16M", OPTION_SIZE, &value) && value == 16 << 20);
    HOLDS(number_read("0", OPTION_SIZE, &value) && value == 0);
    HOLDS(number_read("2s", OPTION_DURATION, &value) && value == 2000);
    HOLDS(number_read("20ms", OPTION_DURATION, &value) && value == 20);
    const char *const refused[] = {
        "", "-1", " 1", "+1", "1k", "1MM", "0x10", "18446744073709551616", "18446744073709551615G"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        HOLDS(!number_read(refused[i], OPTION_SIZE, &value));
    HOLDS(!number_read("20", OPTION_DURATION, &value));
    HOLDS(!number_read("1M", OPTION_NUMBER, &value));
}

static void a_page_is_good_only_as_it_was_written(void)
{
    static uint64_t page[PAGE_WORDS];
    for (int i = 0; i < CASES; i++) {
        uint64_t number = below(1 << 20), generation = below(1 << 20);
        page_write(page, number, generation);
        HOLDS(page_judge(page, number, generation) == PAGE_GOOD);
        HOLDS(page_judge(page, number, generation + 1) == PAGE_STALE);
        HOLDS(page_judge(page, number + 1, generation) == PAGE_FOREIGN);
        flip(page, below(PAGE_BYTES * 8));
        HOLDS(page_judge(page, number, generation) == PAGE_BROKEN);
    }
    memset(page, 0, sizeof page);
    HOLDS(page_judge(page, 0, 0) == PAGE_BROKEN);
}

static void a_page_of_two_writes_is_broken(void)
{
    static uint64_t page[PAGE_WORDS], newer[PAGE_WORDS];
    for (int i = 0; i < CASES; i++) {
        uint64_t words = 1 + below(PAGE_WORDS - 1);
        page_write(page, 5, 7);
        page_write(newer, 5, 8);
        if (words == 1)
            continue; /* Only the page number is the same in both. */
        memcpy(page, newer, words * 8);
        HOLDS(page_judge(page, 5, 8) == PAGE_BROKEN);
    }
}

static void a_record_reads_back_or_not_at_all(void)
{
    unsigned char block[BLOCK_BYTES];
    for (int i = 0; i < CASES; i++) {
        struct record record = {random_next(&state), 1 + below(1 << 30), below(1 << 30)}, found;
        record_encode(block, &record);
        HOLDS(record_decode(block, record.run, &found));
        HOLDS(found.number == record.number && found.flushed == record.flushed);
        HOLDS(!record_decode(block, record.run + 1, &found));
        flip(block, below(BLOCK_BYTES * 8));
        HOLDS(!record_decode(block, record.run, &found));
    }
}

static void a_header_reads_back_or_not_at_all(void)
{
    unsigned char block[BLOCK_BYTES];
    struct log_header header = {.run = 42, .slots = 4095}, found;
    header_encode(block, &header);
    HOLDS(header_decode(block, &found) && found.run == 42 && found.slots == 4095);
    for (int bit = 0; bit < BLOCK_BYTES * 8; bit++) {
        flip(block, (uint64_t)bit);
        HOLDS(!header_decode(block, &found));
        flip(block, (uint64_t)bit);
    }
}

/*
 * Compares with a plain model: the slots of a log whose records were written one after the other.
 */
static void a_slot_is_due_the_newest_flushed_record(void)
{
    enum { SLOTS = 37 };
    uint64_t newest[SLOTS] = {0};
    for (uint64_t number = 1; number < 1000; number++) {
        newest[(number - 1) % SLOTS] = number;
        HOLDS(record_offset(number, SLOTS) == (1 + (number - 1) % SLOTS) * BLOCK_BYTES);
        for (uint64_t slot = 0; slot < SLOTS; slot++)
            HOLDS(record_due(slot, SLOTS, number) == newest[slot]);
    }
}

static void only_what_was_not_flushed_may_be_torn(void)
{
    enum { SLOTS = 64 };
    for (uint64_t flushed = 0; flushed < 4 * SLOTS; flushed++) {
        for (uint64_t slot = 0; slot < SLOTS; slot++) {
            uint64_t due = record_due(slot, SLOTS, flushed), next = due ? due + SLOTS : slot + 1;
            bool under_way = next <= flushed + BATCH_MOST;
            HOLDS(slot_judge(slot, SLOTS, due, flushed) == SLOT_GOOD);
            HOLDS(slot_judge(slot, SLOTS, next, flushed) == (under_way ? SLOT_GOOD : SLOT_AHEAD));
            if (due)
                HOLDS(slot_judge(slot, SLOTS, 0, flushed) == (under_way ? SLOT_TORN : SLOT_LOST));
            if (due > SLOTS)
                HOLDS(slot_judge(slot, SLOTS, due - SLOTS, flushed) == SLOT_LOST);
        }
    }
}

/*
 * Writes a log to a file, then undoes or breaks single writes. Each is found, but only if it had
 * been flushed.
 */
static void a_log_misses_nothing_that_was_flushed(void)
{
    enum { SLOTS = 64, LAST = 150, FLUSHED = LAST - 3 };
    static unsigned char block[BLOCK_BYTES] __attribute__((aligned(BLOCK_BYTES)));
    char path[] = "./laws-log-XXXXXX";
    int fd = mkstemp(path);
    HOLDS(fd >= 0);
    struct log_header header = {.run = 7, .slots = SLOTS};
    header_encode(block, &header);
    HOLDS(pwrite(fd, block, BLOCK_BYTES, 0) == BLOCK_BYTES);
    for (uint64_t number = 1; number <= LAST; number++) {
        record_encode(block, &(struct record){header.run, number, number > FLUSHED ? FLUSHED : 0});
        HOLDS(pwrite(fd, block, BLOCK_BYTES, (off_t)record_offset(number, SLOTS)) == BLOCK_BYTES);
    }
    struct disk_log log = {.path = path};
    struct disk_verdict verdict;
    HOLDS(disk_log_open(&log, O_RDONLY) && disk_log_header(&log));
    HOLDS(disk_log_judge(&log, 0, &verdict) && verdict.errors == 0 && verdict.last == LAST &&
          verdict.flushed == FLUSHED);
    for (uint64_t number = LAST - SLOTS + 1; number <= LAST; number++) {
        off_t offset = (off_t)record_offset(number, SLOTS);
        for (int broken = 0; broken < 2; broken++) {
            /*
             * An old record in place of a flushed one is a loss. A broken one may be the next one,
             * in flight.
             */
            uint64_t expected =
                number <= FLUSHED && !(broken && number + SLOTS <= FLUSHED + BATCH_MOST);
            record_encode(block, &(struct record){header.run, number - SLOTS, 0});
            if (broken)
                flip(block, below(BLOCK_BYTES * 8));
            HOLDS(pwrite(fd, block, BLOCK_BYTES, offset) == BLOCK_BYTES);
            /* Two of the three last records still tell which record was flushed. */
            HOLDS(disk_log_judge(&log, 0, &verdict) && verdict.errors == expected);
        }
        record_encode(block, &(struct record){header.run, number, number > FLUSHED ? FLUSHED : 0});
        HOLDS(pwrite(fd, block, BLOCK_BYTES, offset) == BLOCK_BYTES);
    }
    HOLDS(disk_log_judge(&log, LAST, &verdict) && verdict.errors == 0);
    HOLDS(disk_log_judge(&log, LAST + 1, &verdict) && verdict.errors == 1);
    close(log.fd);
    close(fd);
    unlink(path);
}

static void a_message_reads_back_or_not_at_all(void)
{
    unsigned char bytes[MESSAGE_BYTES];
    for (int i = 0; i < CASES; i++) {
        struct message message = {random_next(&state), random_next(&state)}, found;
        message_encode(bytes, &message);
        HOLDS(message_decode(bytes, &found) && found.number == message.number &&
              found.nonce == message.nonce);
        flip(bytes, below(MESSAGE_BYTES * 8));
        HOLDS(!message_decode(bytes, &found));
    }
}

int main(void)
{
#define LAW(name) {#name, name}
    static const struct {
        const char *name;
        void (*check)(void);
    } all[] = {
        LAW(the_checksum_is_crc32c),
        LAW(numbers_have_their_units),
        LAW(a_page_is_good_only_as_it_was_written),
        LAW(a_page_of_two_writes_is_broken),
        LAW(a_record_reads_back_or_not_at_all),
        LAW(a_header_reads_back_or_not_at_all),
        LAW(a_slot_is_due_the_newest_flushed_record),
        LAW(only_what_was_not_flushed_may_be_torn),
        LAW(a_log_misses_nothing_that_was_flushed),
        LAW(a_message_reads_back_or_not_at_all),
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        law = all[i].name;
        all[i].check();
    }
    return EXIT_PASSED;
}

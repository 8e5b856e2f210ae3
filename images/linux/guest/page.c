/* Writes and checks stamped pages; page.h has the layout. */
#include "page.h"

#include "check.h"

/*
 * The sequence is a linear congruential one. A page takes about a microsecond, and the top bits
 * never repeat within it.
 */
static const uint64_t MULTIPLIER = 6364136223846793005ull, INCREMENT = 1442695040888963407ull;

enum { NUMBER, GENERATION, CHECKSUM, BODY };

static uint64_t body_start(uint64_t number, uint64_t generation)
{
    return scramble(number ^ scramble(generation + 1));
}

static uint64_t sum_add(uint64_t sum, uint64_t word)
{
    return (sum << 1 | sum >> 63) + word;
}

void page_write(uint64_t *page, uint64_t number, uint64_t generation)
{
    uint64_t word = body_start(number, generation);
    uint64_t sum = sum_add(sum_add(0, number), generation);
    page[NUMBER] = number;
    page[GENERATION] = generation;
    for (int i = BODY; i < PAGE_WORDS; i++) {
        word = word * MULTIPLIER + INCREMENT;
        page[i] = word;
        sum = sum_add(sum, word);
    }
    page[CHECKSUM] = sum;
}

/* Returns whether every word of the page agrees with its own stamp. */
static bool whole(const uint64_t *page)
{
    uint64_t word = body_start(page[NUMBER], page[GENERATION]);
    uint64_t sum = sum_add(sum_add(0, page[NUMBER]), page[GENERATION]);
    uint64_t differences = 0;
    for (int i = BODY; i < PAGE_WORDS; i++) {
        word = word * MULTIPLIER + INCREMENT;
        differences |= page[i] ^ word;
        sum = sum_add(sum, page[i]);
    }
    return differences == 0 && page[CHECKSUM] == sum;
}

enum page_verdict page_judge(const uint64_t *page, uint64_t number, uint64_t generation)
{
    if (!whole(page))
        return PAGE_BROKEN;
    if (page[NUMBER] != number)
        return PAGE_FOREIGN;
    return page[GENERATION] == generation ? PAGE_GOOD : PAGE_STALE;
}

const char *page_verdict_text(enum page_verdict verdict)
{
    switch (verdict) {
    case PAGE_GOOD:
        return "as it was written";
    case PAGE_STALE:
        return "whole, but of another generation";
    case PAGE_FOREIGN:
        return "whole, but of another page";
    case PAGE_BROKEN:
        return "broken";
    }
    return "?";
}

/*
 * A stamped page: the content that the memory checker writes into each of its pages, and the
 * verdict on a page that it reads.
 *
 *   word 0      page number
 *   word 1      generation, the number of times that the page was written
 *   word 2      checksum of words 0, 1 and 3 to 511
 *   word 3..511 a sequence that number and generation begin
 */
#ifndef DRIFTLINE_PAGE_H
#define DRIFTLINE_PAGE_H

#include <stdint.h>

enum page_verdict {
    PAGE_GOOD,
    PAGE_STALE,   /* this page, complete, of another generation: a write was lost or rolled back */
    PAGE_FOREIGN, /* another page, complete: content went to the wrong place */
    PAGE_BROKEN,  /* no page that was ever written completely */
};

void page_write(uint64_t *page, uint64_t number, uint64_t generation);
enum page_verdict page_judge(const uint64_t *page, uint64_t number, uint64_t generation);
const char *page_verdict_text(enum page_verdict verdict);

#endif

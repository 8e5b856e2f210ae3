/* Encodes and decodes the echo's messages; message.h has the layout. */
#include "message.h"

#include "check.h"

#include <string.h>

static const char MAGIC[8] = "DLECHO\0\1";

enum { NUMBER = 8, NONCE = 16, FILLER = 24, CHECKSUM = 60 };

static void put(unsigned char *to, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        to[i] = (unsigned char)(value >> 8 * i);
}

static uint64_t get(const unsigned char *from, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)from[i] << 8 * i;
    return value;
}

void message_encode(unsigned char *bytes, const struct message *message)
{
    memcpy(bytes, MAGIC, 8);
    put(bytes + NUMBER, message->number, 8);
    put(bytes + NONCE, message->nonce, 8);
    uint64_t state = message->nonce ^ message->number;
    for (int at = FILLER; at < CHECKSUM; at += 4)
        put(bytes + at, random_next(&state), 4);
    put(bytes + CHECKSUM, crc32c(0, bytes, CHECKSUM), 4);
}

bool message_decode(const unsigned char *bytes, struct message *message)
{
    unsigned char expected[MESSAGE_BYTES];
    message->number = get(bytes + NUMBER, 8);
    message->nonce = get(bytes + NONCE, 8);
    message_encode(expected, message);
    return memcmp(bytes, expected, MESSAGE_BYTES) == 0;
}

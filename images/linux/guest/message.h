/*
 * The message of the echo: 64 bytes, little-endian. A client can tell which answer it reads and
 * that it is complete.
 *
 *   0  magic "DLECHO\0\1"      8  number, from 0 up within a connection
 *   16 nonce of the connection 24 filler that nonce and number determine
 *   60 CRC-32C of the bytes before
 */
#ifndef DRIFTLINE_MESSAGE_H
#define DRIFTLINE_MESSAGE_H

#include <stdbool.h>
#include <stdint.h>

enum { MESSAGE_BYTES = 64 };

struct message {
    uint64_t number, nonce;
};

void message_encode(unsigned char *bytes, const struct message *message);
bool message_decode(const unsigned char *bytes, struct message *message);

#endif

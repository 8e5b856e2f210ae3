/*
 * Sets up the guest's network without a netlink library: loopback, and one interface with one
 * address.
 */
#ifndef DRIFTLINE_NETWORK_H
#define DRIFTLINE_NETWORK_H

void network_loopback(void);
/* `address` is A.B.C.D/BITS; `gateway` may be NULL. Prints a line for each step that fails. */
void network_start(const char *interface, char *address, const char *gateway);

#endif

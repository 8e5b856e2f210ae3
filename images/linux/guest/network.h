/* Brings the guest's network up, without a netlink library: loopback, and one interface with one address. */
#ifndef DRIFTLINE_NETWORK_H
#define DRIFTLINE_NETWORK_H

void network_loopback(void);
/* `address` is A.B.C.D/BITS; `gateway` may be NULL. Says in a line what did not work. */
void network_start(const char *interface, char *address, const char *gateway);

#endif

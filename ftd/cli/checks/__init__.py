"""``ftd doctor``: is this host ready to join a cluster? Each check answers with a fact or a remedy."""

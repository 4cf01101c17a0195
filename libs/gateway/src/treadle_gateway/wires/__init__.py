"""One file a wire: what a request asks, and how a reply, a stream and an error look."""

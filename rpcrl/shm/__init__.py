"""Large buffers between processes of one host, without a socket. Life and ownership: docs/shared-memory.md."""

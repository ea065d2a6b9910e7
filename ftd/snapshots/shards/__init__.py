"""What a node keeps of snapshots, its own and others', and how it goes from node to node."""

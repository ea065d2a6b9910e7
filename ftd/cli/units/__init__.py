"""What ``ftd install`` puts on a host: systemd units, a user, directories, a sample configuration."""

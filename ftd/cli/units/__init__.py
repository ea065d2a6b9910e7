"""Files that ``ftd install`` puts on a host: systemd units, a user, directories, and a sample configuration."""

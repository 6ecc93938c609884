"""The runtime ``docker``: containers of a Docker daemon, or of Podman's socket."""

"""The policy plane measured: what the client costs, how busy it keeps engines, what a weight update costs and loses."""

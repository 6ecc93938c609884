"""The runtime ``wasm``: CPython in WebAssembly."""

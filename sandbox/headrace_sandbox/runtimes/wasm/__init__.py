"""The process that runs WebAssembly, and what it needs: of the runtime ``wasm``."""

//! What Kiln measures and verifies: the registry of operators, their gates, benches and peers.

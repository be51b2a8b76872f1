//! A small language model built from Kiln layers: data, training, generation.

//! Short programs, one idea each.

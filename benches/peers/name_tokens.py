"""Puts other tokens into the numbers of `kiln bench embedding --data FOLDER`, which draws all rows alike.

    kiln bench embedding --shapes train --data numbers          # writes the numbers
    python3 benches/peers/name_tokens.py zipf numbers           # a row as often as 1 / its rank
    kiln bench embedding --shapes train --data numbers          # reads them
    python3 benches/peers/name_tokens.py one numbers            # one row for all tokens
"""

import argparse
import json
import pathlib
import struct

try:
    import numpy as np
except ModuleNotFoundError:
    np = None


def tokens(distribution, rows, count):
    if distribution == "one":
        return np.full(count, rows // 3)
    drawn = np.random.default_rng(1)
    shares = 1.0 / np.arange(1, rows + 1)
    ranks = drawn.choice(rows, count, p=shares / shares.sum())
    return drawn.permutation(rows)[ranks]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("distribution", choices=["zipf", "one"], help="a row as often as 1 / its rank, or one for all")
    parser.add_argument("folder", type=pathlib.Path, help="of `--data`; its files are changed in place")
    args = parser.parse_args()
    if np is None:
        parser.error("numpy is missing: pip install numpy")
    files = sorted(args.folder.rglob("embedding*.safetensors"))
    if not files:
        parser.error(f"no numbers of embedding in {args.folder}: kiln bench embedding --data {args.folder} writes them")
    for path in files:
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        begin, end = (8 + length + offset for offset in header["tokens"]["data_offsets"])
        held = np.frombuffer(bytes(data[begin:end]), dtype="<i8")
        new = tokens(args.distribution, header["weight"]["shape"][0], held.size)
        data[begin:end] = new.astype("<i8").tobytes()
        path.write_bytes(data)
        print(f"{path}: {len(set(new.tolist()))} rows, the most frequent {np.bincount(new).max()} times of {held.size}")


if __name__ == "__main__":
    main()

// Owns the decompression for browsers without DecompressionStream: RFC 1951 within
// RFC 1952, as far as Go's writer uses it (no header fields).

const codes = (lengths) => {
  const counts = new Uint16Array(16), offsets = new Uint16Array(16), symbols = new Uint16Array(lengths.length);
  for (const n of lengths) counts[n]++;
  counts[0] = 0;
  for (let i = 1; i < 16; i++) offsets[i] = offsets[i - 1] + counts[i - 1];
  lengths.forEach((n, symbol) => { if (n) symbols[offsets[n]++] = symbol; });
  return { counts, symbols };
};

const inflate = (input) => {
  let at = 10, bit = 0, out = new Uint8Array(input.length * 8), size = 0;
  const bits = (n) => {
    let v = 0;
    for (let i = 0; i < n; i++) {
      v |= ((input[at] >> bit) & 1) << i;
      if (++bit === 8) { bit = 0; at++; }
    }
    return v;
  };
  const symbol = ({ counts, symbols }) => {
    let code = 0, first = 0, index = 0;
    for (let n = 1; n < 16; n++) {
      code |= bits(1);
      if (code - counts[n] < first) return symbols[index + code - first];
      index += counts[n];
      first = (first + counts[n]) << 1;
      code <<= 1;
    }
    throw new Error("the data in this page is damaged");
  };
  const put = (byte) => {
    if (size === out.length) {
      const larger = new Uint8Array(out.length * 2);
      larger.set(out);
      out = larger;
    }
    out[size++] = byte;
  };
  // Lengths and distances grow by doubling: four, or two, codes for each further bit.
  const lengthOf = (c) => {
    if (c < 8) return c + 3;
    if (c === 28) return 258;
    const extra = (c >> 2) - 1;
    return 3 + ((4 + (c & 3)) << extra) + bits(extra);
  };
  const distanceOf = (c) => {
    if (c < 4) return c + 1;
    const extra = (c >> 1) - 1;
    return 1 + ((2 + (c & 1)) << extra) + bits(extra);
  };
  const order = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];
  const tables = (kind) => {
    if (kind === 1) {
      const lengths = Array.from({ length: 288 }, (_, i) => i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8);
      return [codes(lengths), codes(new Array(30).fill(5))];
    }
    const literals = bits(5) + 257, distances = bits(5) + 1, n = bits(4) + 4, small = new Array(19).fill(0);
    for (let i = 0; i < n; i++) small[order[i]] = bits(3);
    const code = codes(small), lengths = [];
    while (lengths.length < literals + distances) {
      const c = symbol(code);
      if (c < 16) lengths.push(c);
      else {
        const value = c === 16 ? lengths[lengths.length - 1] : 0;
        const times = c === 16 ? 3 + bits(2) : c === 17 ? 3 + bits(3) : 11 + bits(7);
        for (let i = 0; i < times; i++) lengths.push(value);
      }
    }
    return [codes(lengths.slice(0, literals)), codes(lengths.slice(literals))];
  };
  for (let last = 0; !last;) {
    last = bits(1);
    const kind = bits(2);
    if (kind === 0) {
      if (bit) { bit = 0; at++; }
      const n = input[at] | input[at + 1] << 8;
      at += 4;
      for (let i = 0; i < n; i++) put(input[at++]);
      continue;
    }
    const [literals, distances] = tables(kind);
    for (let c = symbol(literals); c !== 256; c = symbol(literals)) {
      if (c < 256) { put(c); continue; }
      const n = lengthOf(c - 257), back = distanceOf(symbol(distances));
      for (let i = 0; i < n; i++) put(out[size - back]);
    }
  }
  return out.subarray(0, size);
};

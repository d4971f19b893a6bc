// This file owns how a copy is divided into the aligned blocks of the kernels. Plain copy
// handles heads, tails and what is too small for a block.

package memcopy

const (
	lineBytes = 64
	pageBytes = 4096
)

// stream copies len(dst) = len(src) bytes with non-temporal stores.
//
// The kernel walks several pages at once, one line of each in turn, because the
// hardware prefetcher stops at page ends and follows several streams at once.
// Speed over plain copy at 64 MiB: one stream 1.17 (AVX-512) and 1.23 (AVX2),
// whether unrolled 4 or 8 times and with or without PREFETCHT0 1 to 4 KiB
// ahead; 2 pages 1.37, 4 pages 1.75, 8 pages 1.77, 16 pages 1.61, also without
// gain from prefetching. PREFETCHNTA: 0.81 (1 stream), 0.85 (8 pages).
func stream(k kind, dst, src []byte) {
	streamUnfenced(k, dst, src)
	storeFence()
}

// streamUnfenced leaves the fence, which waits for the stores, to the caller, because more
// will be streamed.
func streamUnfenced(k kind, dst, src []byte) {
	head := min(lineGap(dst), len(dst))
	copy(dst[:head], src[:head])
	i, step := head, k.streams()*pageBytes
	for ; len(dst)-i >= step; i += step {
		copyBlock(k, &dst[i], pageBytes, &src[i], pageBytes, pageBytes/lineBytes)
	}
	copy(dst[i:], src[i:])
}

// streamRows copies rows. The caller has checked that they lie in the slices. The rows that
// streamGroups leaves are copied one by one, and streamed if at least half of a row is in
// whole blocks.
func streamRows(k kind, dst []byte, dpitch int, src []byte, spitch int, width, height int) {
	for i := streamGroups(k, dst, dpitch, src, spitch, width, height); i < height; i++ {
		d, s := dst[i*dpitch:][:width], src[i*spitch:][:width]
		if width >= 2*k.streams()*pageBytes {
			stream(k, d, s)
		} else {
			copy(d, s)
		}
	}
}

// streamGroups copies as many rows as the kernel walks at once, each a stream,
// and returns how many rows it copied: none where that does not pay.
//
// Speed over plain copy of every row, 32 MiB in all: 64-byte rows 1.1 (but 0.8 at
// 2 MiB in all), 256 bytes 1.4, 2 KiB 1.8, 4 to 32 KiB 1.7. A partial line at the
// end of a row costs a read of that line: 256 bytes 0.7, 1 KiB 1.2, 2 KiB 1.5.
// Rows of 1 MiB go alone: at most 3 % of one is outside whole blocks.
func streamGroups(k kind, dst []byte, dpitch int, src []byte, spitch int, width, height int) int {
	head := lineGap(dst)
	whole := head == 0 && width%lineBytes == 0
	if dpitch%lineBytes != 0 || width >= 1<<20 || width < 2*lineBytes || !whole && width < 2<<10 {
		return 0
	}
	rows, i := k.streams(), 0
	tail := width - (width-head)%lineBytes
	for ; height-i >= rows; i += rows {
		d, s := dst[i*dpitch:], src[i*spitch:]
		for c := head; c < tail; c += pageBytes {
			copyBlock(k, &d[c], dpitch, &s[c], spitch, min(pageBytes, tail-c)/lineBytes)
		}
		for r := 0; r < rows && !whole; r++ {
			d, s := d[r*dpitch:][:width], s[r*spitch:][:width]
			copy(d[:head], s[:head])
			copy(d[tail:], s[tail:])
		}
	}
	storeFence()
	return i
}

// streamFill fills with non-temporal stores. One stream is enough, and AVX2:
// without loads there is nothing to prefetch (AVX2 17.0 GB/s, AVX-512 17.2,
// AVX-512 over 4 pages 16.8, at 128 MiB).
func streamFill(dst []byte, value byte) {
	head := lineGap(dst)
	fillPlain(dst[:head], value)
	const step = 8 * pageBytes
	i := head
	for ; len(dst)-i >= step; i += step {
		fillBlock(&dst[i], value, step)
	}
	storeFence()
	fillPlain(dst[i:], value)
}

// lineGap returns the number of bytes from the start of b to the next cache line.
func lineGap(b []byte) int { return int(-address(b) % lineBytes) }

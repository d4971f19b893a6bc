// This file owns the tests against plain copies, with guard bytes all around.

package memcopy

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
)

const guard = 2 * lineBytes

// arena is a buffer with guard bytes around the n bytes at a chosen offset in
// their cache line. Conservation: after a copy of m bytes, the m bytes are the
// source's and all others are what they were.
type arena struct {
	all  []byte
	from int
	n    int
}

func newArena(n, offset int) arena {
	all := make([]byte, n+2*guard+lineBytes)
	for i := range 256 {
		all[i] = 0xA5 ^ byte(i)
	}
	for i := 256; i < len(all); {
		i += copy(all[i:], all[:i&^255])
	}
	return arena{all, lineGap(all) + lineBytes + offset, n}
}

func (a arena) bytes() []byte { return a.all[a.from:][:a.n:a.n] }

// check compares everything, the guards too, with the same operation done by
// plain means on an untouched twin.
func (a arena) check(t *testing.T, what string, expected func(dst []byte)) {
	t.Helper()
	twin := newArena(a.n, 0)
	want := twin.all[:len(a.all)]
	expected(want[a.from:][:a.n])
	if bytes.Equal(a.all, want) {
		return
	}
	for i := range want {
		if a.all[i] != want[i] {
			t.Fatalf("%s: byte %d of %d is %#x, want %#x", what, i-a.from, a.n, a.all[i], want[i])
		}
	}
}

// random returns bytes to copy from, which nothing may change before the test ends.
func random(t testing.TB, n int, seed uint64) []byte {
	draw := func() []byte {
		b := make([]byte, n)
		_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b)
		return b
	}
	b := draw()
	t.Cleanup(func() {
		if !bytes.Equal(b, draw()) {
			t.Error("a source was written to")
		}
	})
	return b
}

func supported() []Variant {
	var s []Variant
	for _, v := range Variants() {
		if v.Supported {
			s = append(s, v)
		}
	}
	return s
}

func supportedKinds() []kind {
	var ks []kind
	for k := kindAVX2; k <= best; k++ {
		ks = append(ks, k)
	}
	return ks
}

func TestSmallSizesAndAlignments(t *testing.T) {
	src := random(t, 512+lineBytes, 1)
	for _, v := range supported() {
		for size := 0; size <= 512; size++ {
			for _, at := range [][2]int{{0, 0}, {1, 0}, {0, 1}, {31, 33}, {32, 63}, {63, 17}} {
				a := newArena(size, at[0])
				s := src[at[1]:][:size]
				v.Func(a.bytes(), s)
				a.check(t, fmt.Sprintf("%s, %d bytes at %v", v.Name, size, at), func(d []byte) { copy(d, s) })
			}
		}
	}
}

// Every alignment of both sides, at the sizes round one and two blocks of each
// kernel.
func TestBlockSizesAndAlignments(t *testing.T) {
	src := random(t, 3*8*pageBytes+lineBytes, 2)
	for _, v := range supported() {
		for _, blocks := range []int{4, 8, 16} {
			for _, extra := range []int{-1, 0, 1, lineBytes - 1, lineBytes, pageBytes + 77} {
				size := blocks*pageBytes + extra
				for at := range lineBytes {
					a := newArena(size, at)
					s := src[(at*7)%lineBytes:][:size]
					v.Func(a.bytes(), s)
					a.check(t, fmt.Sprintf("%s, %d bytes at %d", v.Name, size, at), func(d []byte) { copy(d, s) })
				}
			}
		}
	}
}

func TestLarge(t *testing.T) {
	const most = 3*StreamFrom + 12345
	src := random(t, most+lineBytes, 3)
	copies := supported()
	copies = append(copies, Variant{Name: "Copy", Func: Copy})
	for _, threads := range []int{0, 1, 2, 3, 64} {
		copies = append(copies, Variant{Name: fmt.Sprintf("Parallel %d", threads),
			Func: func(dst, src []byte) { Parallel(dst, src, threads) }})
	}
	r := rand.New(rand.NewPCG(1, 2))
	// Just above a multiple of a chunk, the last chunk would start past the end
	// if the shift to the next line were forgotten.
	sizes := []int{StreamFrom - 1, StreamFrom, StreamFrom + 1, StreamFrom + lineBytes, most}
	for range 4 {
		sizes = append(sizes, r.IntN(most))
	}
	for _, v := range copies {
		for _, size := range sizes {
			at, from := r.IntN(lineBytes), r.IntN(lineBytes)
			a := newArena(size, at)
			s := src[from:][:size]
			v.Func(a.bytes(), s)
			a.check(t, fmt.Sprintf("%s, %d bytes at %d, %d", v.Name, size, at, from), func(d []byte) { copy(d, s) })
		}
	}
}

func TestLengthIsTheShorter(t *testing.T) {
	n := StreamFrom + 100
	long, short := random(t, n+100_000, 4), random(t, n, 5)
	for _, v := range supported() {
		dst := bytes.Clone(long)
		v.Func(dst, short)
		if !bytes.Equal(dst, append(bytes.Clone(short), long[n:]...)) {
			t.Errorf("%s from a shorter source", v.Name)
		}
		dst = make([]byte, n)
		if v.Func(dst, long); !bytes.Equal(dst, long[:n]) {
			t.Errorf("%s to a shorter destination", v.Name)
		}
	}
	dst := bytes.Clone(long)
	Copy(dst, short)
	if !bytes.Equal(dst, append(bytes.Clone(short), long[n:]...)) {
		t.Error("Copy from a shorter source")
	}
	dst = make([]byte, n)
	Parallel(dst, long, 2)
	if !bytes.Equal(dst, long[:n]) {
		t.Error("Parallel to a shorter destination")
	}
	Copy(nil, short)
	Copy(short, nil)
	Parallel(nil, nil, 0)
}

func TestCopy2D(t *testing.T) {
	cases := []struct{ width, height, dpitch, spitch, at int }{
		{0, 5, 10, 10, 0}, {10, 0, 10, 10, 0}, {1, 1, 1, 1, 0}, {7, 9, 7, 7, 3}, {7, 9, 11, 8, 3},
		{4096, 517, 4160, 4096, 0}, {4096, 523, 4160, 5000, 5}, {4097, 523, 8192, 4097, 0}, {4000, 600, 4001, 4001, 9},
		{128, 17000, 128, 192, 0}, {192, 13003, 256, 192, 1}, {100 << 10, 21, 101 << 10, 100 << 10, 17},
		{100 << 10, 21, 100<<10 + 1, 100 << 10, 0}, {1<<20 + 5, 3, 1<<20 + 64, 1<<20 + 64, 0},
		{9000, 240, 9024, 9001, 63}, {1 << 20, 3, 1 << 20, 1 << 20, 0}, {3 << 20, 1, 4 << 20, 5 << 20, 2},
	}
	for _, c := range cases {
		need := func(pitch int) int { return max(c.height-1, 0)*pitch + min(c.width, c.width*c.height) }
		src := random(t, need(c.spitch), 6)
		plain := func(dst []byte) {
			for i := range c.height {
				copy(dst[i*c.dpitch:][:c.width], src[i*c.spitch:][:c.width])
			}
		}
		a := newArena(need(c.dpitch), c.at)
		Copy2D(a.bytes(), c.dpitch, src, c.spitch, c.width, c.height)
		a.check(t, fmt.Sprintf("%+v", c), plain)
		for _, k := range supportedKinds() {
			a := newArena(need(c.dpitch), c.at)
			streamRows(k, a.bytes(), c.dpitch, src, c.spitch, c.width, c.height)
			a.check(t, fmt.Sprintf("%v %+v", k, c), plain)
		}
	}
}

func TestFill(t *testing.T) {
	for _, value := range []byte{0, 1, 0xff} {
		for _, size := range []int{0, 1, 2, 63, 64, 1000, 16<<10 + 1, fillFrom - 1, fillFrom, fillFrom + 12345} {
			for _, at := range []int{0, 1, 40} {
				a := newArena(size, at)
				Fill(a.bytes(), value)
				a.check(t, fmt.Sprintf("Fill %d bytes at %d", size, at), func(d []byte) {
					for i := range d {
						d[i] = value
					}
				})
			}
		}
	}
}

func TestProgrammersErrorsPanic(t *testing.T) {
	b := make([]byte, 4*StreamFrom)
	n := 2 * StreamFrom
	calls := map[string]func(){
		"bytes away":   func() { Copy(b[:n], b[n-1:]) },
		"overlaps":     func() { Copy(b[1:], b[:n]) },
		"overlaps it":  func() { Parallel(b[64:], b[:n], 2) },
		"dst pitch":    func() { Copy2D(b, 9, b, 10, 10, 2) },
		"src pitch":    func() { Copy2D(b, 10, b, 9, 10, 2) },
		"bytes of src": func() { Copy2D(b, 10, b[:19], 10, 10, 2) },
		"bytes of dst": func() { Copy2D(b[:19], 10, b, 10, 10, 2) },
		"does not fit": func() { Copy2D(b, math.MaxInt/2, b, math.MaxInt/2, 10, 5) },
		"-1 rows":      func() { Copy2D(b, 10, b, 10, 10, -1) },
		"rows of -1":   func() { Copy2D(b, 10, b, 10, -1, 1) },
	}
	for _, v := range Variants() {
		if !v.Supported {
			calls[v.Name+" is not supported"] = func() { v.Func(b[:n], b[n:]) }
		}
	}
	for want, call := range calls {
		func() {
			defer func() {
				if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), want) {
					t.Errorf("want a panic with %q, got %v", want, r)
				}
			}()
			call()
		}()
	}
	want := bytes.Clone(b)
	Copy(b, b)
	Parallel(b, b, 2)
	if !bytes.Equal(b, want) {
		t.Error("a copy onto itself changed something")
	}
}

func TestVariants(t *testing.T) {
	found := false
	for _, v := range Variants() {
		found = found || v.Name == Best() && v.Supported
	}
	if !found {
		t.Errorf("the best variant, %s, is not a supported one of the table", Best())
	}
	if !Variants()[0].Supported || Variants()[0].Name != "copy" {
		t.Error("plain copy must always be there")
	}
}

func TestNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool drop objects at random")
	}
	dst, src := make([]byte, 4*StreamFrom), random(t, 4*StreamFrom, 7)
	piece := func(i int) (d, s []byte) { return dst[i*StreamFrom:][:StreamFrom], src[i*StreamFrom:][:StreamFrom] }
	calls := map[string]func(){
		"Copy small":   func() { Copy(dst[:1000], src) },
		"Copy large":   func() { Copy(dst, src) },
		"Parallel":     func() { Parallel(dst, src, 4) },
		"Parallel all": func() { Parallel(dst, src, 0) },
		"Copy2D":       func() { Copy2D(dst, 8192, src, 8192, 4096, 1000) },
		"Fill":         func() { Fill(dst, 3) },
		"Pieces":       func() { Pieces(4, len(dst), 2, piece) },
		"on the stack": func() { var a, b [100]byte; Copy(a[:], b[:]); runtime.KeepAlive(&a) },
	}
	for name, call := range calls {
		if n := testing.AllocsPerRun(10, call); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// Several copies at once take and return jobs of the same pool.
func TestParallelFromManyGoroutines(t *testing.T) {
	done := make(chan bool)
	const callers = 4
	for c := range callers {
		go func() {
			src := random(t, StreamFrom+c*1000, uint64(c))
			ok := true
			for range 8 {
				dst := make([]byte, len(src))
				Parallel(dst, src, 3)
				ok = ok && bytes.Equal(dst, src)
			}
			done <- ok
		}()
	}
	for range callers {
		if !<-done {
			t.Error("a copy went wrong")
		}
	}
}

// Pieces of every size and number are copied, and nothing beside them, wherever pieces
// follow each other: on both sides, on one or on none.
func TestPieces(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, total := range []int{0, 1, 4096, 100_000, StreamFrom, StreamFrom + 77_777, 9 << 20} {
		for i, page := range []int{4096, 4096, 64 << 10, 64 << 10, 1 << 20} {
			n := (total + page - 1) / page
			dgap, sgap := 64*(i%2), 64*(i/2%2)
			src, dst := random(t, n*(page+sgap), 10), make([]byte, n*(page+dgap))
			places := rng.Perm(n)
			if dgap == 0 {
				slices.Sort(places)
			}
			at := func(i int) (d, s []byte) {
				s = src[i*(page+sgap):][:min(page, total-i*page)]
				return dst[places[i]*(page+dgap):][:len(s)], s
			}
			Pieces(n, total, i%3, at)
			for i := range n {
				d, s := at(i)
				if !bytes.Equal(d, s) {
					t.Fatalf("%d bytes in pieces of %d: piece %d differs", total, page, i)
				}
				clear(d)
			}
			if slices.ContainsFunc(dst, func(b byte) bool { return b != 0 }) {
				t.Fatalf("%d bytes in pieces of %d: bytes beside the pieces were written", total, page)
			}
		}
	}
}

// The chunks of a parallel copy are the whole range, each byte once, and all but the first
// begin on a line.
func TestChunks(t *testing.T) {
	buffer := make([]byte, 3*StreamFrom)
	for _, n := range []int{StreamFrom, StreamFrom + 1, StreamFrom + 63, StreamFrom + chunkBytes - 1, 2*StreamFrom + 77} {
		for at := range lineBytes {
			j := &job{dst: buffer[at:][:n]}
			next := 0
			for c := range (n - lineGap(j.dst) + chunkBytes - 1) / chunkBytes {
				from, to := j.chunk(c)
				if from != next || to <= from || c > 0 && lineGap(j.dst[from:]) != 0 {
					t.Fatalf("%d bytes at %d: chunk %d is %d to %d", n, at, c, from, to)
				}
				next = to
			}
			if next != n {
				t.Fatalf("%d bytes at %d: chunks end at %d", n, at, next)
			}
		}
	}
}

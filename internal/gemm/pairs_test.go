package gemm

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// pairKinds returns the kinds with instructions for bf16 that this machine can run. It skips
// the test if there are none.
func pairKinds(t testing.TB) (ks []kind) {
	for _, k := range kinds() {
		if k >= avx512BF16 {
			ks = append(ks, k)
		}
	}
	if len(ks) == 0 {
		t.Skip("this machine or build has neither AMX nor VDPBF16PS")
	}
	return ks
}

// drawPairs draws a product of two matrices of bf16.
func drawPairs(rng *rand.Rand, m, n, k int) Product {
	p := draw(rng, m, n, k)
	rows, cols := m, k
	if p.TransA {
		rows, cols = k, m
	}
	p.A = random(rng, true, rows, cols, rng.IntN(9))
	rows, cols = k, n
	if p.TransB {
		rows, cols = n, k
	}
	p.B = random(rng, true, rows, cols, rng.IntN(9))
	return p
}

// computed returns a copy of C after a product.
func computed(kind kind, most int, p Product) Matrix {
	c := clone(p.C)
	if samePlace(p.Plus, p.C) {
		p.Plus = c
	}
	p.C = c
	multiply(kind, most, []Product{p})
	return c
}

// TestPairs compares products about the edges of tiles with float64, and their bits for any
// number of threads and any room for B.
func TestPairs(t *testing.T) {
	ks := pairKinds(t)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	rng := rand.New(rand.NewPCG(5, 5))
	ms := []int{1, 2, 11, 12, 13, 16, 31, 32, 33, 48, 95, 96, 97, 130, 193}
	ns := []int{31, 32, 33, 47, 63, 64, 65, 100, 511, 512, 513, 600}
	depths := []int{31, 32, 33, 34, 63, 64, 65, 100, 511, 512, 513, 543, 1024, 1100}
	pick := func(from []int) int { return from[rng.IntN(len(from))] }
	rounds := 60
	if raced {
		rounds = 6 // the detector sees every number
	}
	for range rounds {
		m, n, k := pick(ms), pick(ns), pick(depths)
		if m*n*k > 4<<20 {
			n = min(n, 100)
		}
		p := drawPairs(rng, m, n, k)
		truth := newTruth(p)
		for _, kind := range ks {
			what := fmt.Sprintf("%v, %d x %d x %d, transposed %v %v", kind, m, n, k, p.TransA, p.TransB)
			runtime.GOMAXPROCS(1)
			want := computed(kind, packMost, p)
			truth.verify(t, what, want)
			for _, threads := range []int{2, 3, 7} {
				runtime.GOMAXPROCS(threads)
				if got := computed(kind, []int{0, 1000, 60000}[threads%3], p); !slices.Equal(bits(got), bits(want)) {
					t.Fatalf("%s: %d threads give other bits than one", what, threads)
				}
			}
		}
	}
}

// TestPairsOfRows checks that a row has the same bits alone, among others and elsewhere.
// Policies divide rows differently and must train the same parameters.
func TestPairsOfRows(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 6))
	for _, kind := range pairKinds(t) {
		for _, s := range [][3]int{{200, 40, 40}, {100, 64, 600}, {40, 530, 33}} {
			m, n, k := s[0], s[1], s[2]
			p := Product{A: random(rng, true, m, k, 0), B: random(rng, true, n, k, 1), C: random(rng, false, m, n, 0), TransB: true}
			want := computed(kind, packMost, p)
			for _, r := range [][2]int{{0, 1}, {m - 1, m}, {3, 16}, {5, 38}, {7, m}} {
				part := p
				part.A.Rows, part.A.BF16 = r[1]-r[0], p.A.BF16[r[0]*k:r[1]*k]
				part.C = random(rng, false, r[1]-r[0], n, 0)
				got := computed(kind, packMost, part)
				if !slices.Equal(bits(got), bits(want)[r[0]*n:r[1]*n]) {
					t.Errorf("%v, %v: rows %d to %d alone give other bits than among others", kind, s, r[0], r[1])
				}
			}
			// Rows of A whose numbers are columns, as those of weight gradients.
			turned := p
			turned.TransA, turned.A = true, Matrix{BF16: make([]uint16, m*k), Rows: k, Cols: m, Pitch: m}
			for i := range m {
				for j := range k {
					turned.A.BF16[j*m+i] = p.A.BF16[i*k+j]
				}
			}
			if !slices.Equal(bits(computed(kind, packMost, turned)), bits(want)) {
				t.Errorf("%v, %v: a transposed A gives other bits", kind, s)
			}
		}
	}
}

// TestPairsSpecial checks rounding, NaNs and infinities: in Plus, and in one row of A.
func TestPairsSpecial(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	in := []float32{nan, -nan, inf, -inf, 0, math.Float32frombits(0x3f808000), math.Float32frombits(0x3f818000),
		math.Float32frombits(0x3f808001), math.MaxFloat32, math.Float32frombits(0x7f800001), math.Float32frombits(0xffffffff)}
	want := []uint16{0x7fff, 0x7fff, 0x7f80, 0xff80, 0, 0x3f80, 0x3f82, 0x3f81, 0x7f80, 0x7fff, 0x7fff}
	const size = 33
	for _, kind := range pairKinds(t) {
		zero := func() Matrix {
			return Matrix{BF16: make([]uint16, size*size), Rows: size, Cols: size, Pitch: size}
		}
		p := Product{A: zero(), B: zero(), C: zero(), Plus: Matrix{F32: make([]float32, size*size), Rows: size, Cols: size, Pitch: size}}
		copy(p.Plus.F32[20:], in)
		if got := computed(kind, packMost, p).BF16; !slices.Equal(got[20:20+len(in)], want) {
			t.Errorf("%v: Plus became %x, want %x", kind, got[20:20+len(in)], want)
		}
		for i := range p.B.BF16 {
			p.B.BF16[i] = 0x3f80
		}
		p.A.BF16[2*size+5], p.A.BF16[3*size+6] = 0x7f80, 0x7fc0
		p.Plus = Matrix{}
		got := computed(kind, packMost, p).BF16
		for i, v := range got {
			expect := map[int]uint16{2: 0x7f80, 3: 0x7fff}[i/size]
			if v != expect {
				t.Fatalf("%v: C[%d][%d] is %x, want %x", kind, i/size, i%size, v, expect)
			}
		}
	}
}

// TestPairsUnderSignals computes products while the garbage collector stops goroutines by
// signals and a child process is started: tiles must survive both.
func TestPairsUnderSignals(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	for _, kind := range pairKinds(t) {
		p := Product{A: random(rng, true, 300, 512, 0), B: random(rng, true, 512, 256, 0), C: random(rng, false, 300, 256, 0)}
		want := bits(computed(kind, packMost, p))
		done := make(chan error)
		go func() {
			for range 10 {
				runtime.GC()
			}
			done <- exec.Command(os.Args[0], "-test.run=^$").Run()
		}()
		for going := true; going; {
			select {
			case err := <-done:
				if err != nil {
					t.Error(err)
				}
				going = false
			default:
			}
			if !slices.Equal(bits(computed(kind, packMost, p)), want) {
				t.Errorf("%v: a product has other bits than before", kind)
				going = false
				<-done
			}
		}
	}
}

func TestChoose(t *testing.T) {
	upTo := func(most kind) func(kind) bool { return func(k kind) bool { return k <= most } }
	intel := func(k kind) bool { return k != avx512BF16 }
	for _, c := range []struct {
		name  string
		works func(kind) bool
		pays  func(kind) bool
		want  kind
	}{
		{"", upTo(amx), intel, amx},
		{"", upTo(avx512BF16), intel, avx512},
		{"", upTo(avx512BF16), upTo(amx), avx512BF16},
		{"", upTo(avx2), intel, avx2},
		{"", upTo(plain), intel, plain},
		{"avx512_bf16", upTo(amx), intel, avx512BF16},
		{"amx_bf16", upTo(avx512), intel, avx512},
		{"avx2", upTo(amx), intel, avx2},
		{"plain", upTo(amx), intel, plain},
	} {
		if got := choose(c.name, c.works, c.pays); got != c.want {
			t.Errorf("%q: %v, want %v", c.name, got, c.want)
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("an unknown name was taken")
		}
	}()
	choose("neon", upTo(amx), intel)
}

// TestEncodings disassembles the instructions that are written as bytes. The comment beside
// them is what the disassembler must say.
func TestEncodings(t *testing.T) {
	source, err := os.ReadFile("pairs_amd64.s")
	if err != nil {
		t.Fatal(err)
	}
	var code []byte
	var want []string
	numbers := regexp.MustCompile(`(LONG|WORD|BYTE) +\$0x([0-9a-f]+)`)
	for line := range strings.Lines(string(source)) {
		parts := numbers.FindAllStringSubmatch(line, -1)
		for _, part := range parts {
			v, err := strconv.ParseUint(part[2], 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			for range map[string]int{"LONG": 4, "WORD": 2, "BYTE": 1}[part[1]] {
				code = append(code, byte(v))
				v >>= 8
			}
		}
		if parts != nil {
			_, says, _ := strings.Cut(line, "// ")
			want = append(want, strings.TrimSpace(says))
		}
	}
	if len(want) < 40 {
		t.Fatalf("the source has %d instructions written as bytes", len(want))
	}
	file := filepath.Join(t.TempDir(), "code")
	if err := os.WriteFile(file, code, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("objdump", "-D", "-b", "binary", "-m", "i386:x86-64", "-M", "intel", "--no-show-raw-insn", file).Output()
	if err != nil {
		t.Skipf("no objdump of binutils here: %v", err)
	}
	var got []string
	for line := range strings.Lines(string(out)) {
		if at, says, ok := strings.Cut(line, ":\t"); ok && strings.TrimSpace(at) != "" {
			got = append(got, strings.Join(strings.Fields(says), " "))
		}
	}
	if !slices.Contains(got, "tilerelease") {
		t.Skip("this objdump does not know AMX")
	}
	if !slices.Equal(got, want) {
		t.Errorf("objdump reads\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

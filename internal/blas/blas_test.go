//go:build linux

// This file tests products on a simulated library, and how the library is found. None of
// it needs a GPU.

package blas

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
)

// Products in host memory agree with nn's twins for all transposes, types, pitches and
// addends, and write nothing else.
func TestProducts(t *testing.T) {
	p, f := newFake(t)
	y := newYard(t, 2*memory.MiB)
	for i := range 4 * len(mixes) * 3 * 2 {
		c := y.product(t, caseOf(i), 136, 144, 120)
		y.restore()
		done, err := p.Launch(c.launch.Kernel, c.launch.Args(), 7)
		if err != nil || !done {
			t.Fatalf("%s: done %v, %v", c.name, done, err)
		}
		got := y.bytes()
		y.restore()
		c.launch.Kernel.Go(&c.launch)
		c.compare(t, got, y.bytes())
	}
	if s := slices.Compact(f.streams); !slices.Equal(s, []uintptr{7}) {
		t.Errorf("products ran on streams %v, not 7", s)
	}
}

// The order of sums follows from the shape and types, not from addresses, pitches or the
// addend. The library is asked once, for algorithms that keep the rules.
func TestAlgorithmFollowsFromShape(t *testing.T) {
	p, f := newFake(t)
	y := newYard(t, 2*memory.MiB)
	f.offers = []offer{{reduction: 2}, {workspace: 1}, {state: errNotSupported}, {}, {}}
	for _, mix := range mixes {
		f.prefs, f.ran = nil, nil
		for i := range 6 {
			c := y.product(t, variant{mix: mix, spare: i % 2, plus: plus(i % 3), shift: i}, 160, 128, 128)
			if done, err := p.Launch(c.launch.Kernel, c.launch.Args(), 0); err != nil || !done {
				t.Fatalf("%s: done %v, %v", c.name, done, err)
			}
			if a := f.last() & 0xff; a != 4 {
				t.Fatalf("%s ran by candidate %d; the first that keeps the rules is 4", c.name, a)
			}
		}
		if len(f.prefs) != 1 {
			t.Fatalf("the library was asked %d times about one shape", len(f.prefs))
		}
		numerics := ^uint64(0)
		if mix.in == kernels.F32 {
			numerics = ^uint64(0x0700fe)
		}
		want := fakePreference{1: 0, 3: 0, 5: 16, 6: 16, 7: 16, 8: 16, 12: numerics}
		if !maps.Equal(f.prefs[0], want) {
			t.Errorf("asked for algorithms with %v, want %v", f.prefs[0], want)
		}
	}
}

// If no algorithm keeps the rules, or the library does not run it, the kernel does the
// product, now and always.
func TestRefused(t *testing.T) {
	y := newYard(t, 2*memory.MiB)
	c := y.product(t, variant{mix: mixes[0]}, 128, 128, 128)
	for name, set := range map[string]func(f *fake){
		"a sum in parts":           func(f *fake) { f.offers = []offer{{reduction: 1}} },
		"a workspace":              func(f *fake) { f.offers = []offer{{workspace: 1}} },
		"nothing":                  func(f *fake) { f.offers = nil },
		"a failure":                func(f *fake) { f.offers = []offer{{state: errNotSupported}} },
		"no heuristic":             func(f *fake) { f.fail["cublasLtMatmulAlgoGetHeuristic"] = errNotSupported },
		"an answer to no question": func(f *fake) { f.fail["cublasLtMatmulAlgoConfigGetAttribute"] = errInvalidValue },
		"a refusal to run":         func(f *fake) { f.fail["cublasLtMatmul"] = errNotSupported },
	} {
		t.Run(name, func(t *testing.T) {
			p, f := newFake(t)
			set(f)
			for range 3 {
				if done, err := p.Launch(c.launch.Kernel, c.launch.Args(), 0); done || err != nil {
					t.Errorf("done %v, %v", done, err)
				}
				clear(f.fail)
				f.offers = []offer{{}}
			}
			if n := f.calls["cublasLtMatmulAlgoGetHeuristic"]; n != 1 || len(f.ran) > 0 {
				t.Errorf("asked %d times, ran %d products", n, len(f.ran))
			}
		})
	}
}

func TestNotForTheLibrary(t *testing.T) {
	p, f := newFake(t)
	y := newYard(t, 2*memory.MiB)
	bf16, f32 := kernels.BF16, kernels.F32
	for name, l := range map[string]device.Launch{
		"small":                    y.product(t, variant{mix: mixes[0]}, 127, 128, 128).launch,
		"odd pitch":                y.product(t, variant{mix: mixes[0], odd: true}, 160, 128, 128).launch,
		"odd address":              y.product(t, variant{mix: mixes[0], off: 8}, 160, 128, 128).launch,
		"bf16 times fp32":          nn.GemmLaunch(nn.Product{A: y.matrix(bf16, 160, 128, 128), B: y.matrix(f32, 128, 128, 128), C: y.matrix(f32, 160, 128, 128)}),
		"fp32 to bf16":             nn.GemmLaunch(nn.Product{A: y.matrix(f32, 160, 128, 128), B: y.matrix(f32, 128, 128, 128), C: y.matrix(bf16, 160, 128, 128)}),
		"bf16 plus fp32":           nn.GemmLaunch(nn.Product{A: y.matrix(bf16, 160, 128, 128), B: y.matrix(bf16, 128, 128, 128), C: y.matrix(bf16, 160, 128, 128), Plus: y.matrix(f32, 160, 128, 128)}),
		"an odd pitch of Plus":     nn.GemmLaunch(nn.Product{A: y.matrix(bf16, 160, 128, 128), B: y.matrix(bf16, 128, 128, 128), C: y.matrix(f32, 160, 128, 128), Plus: y.matrix(f32, 160, 128, 129)}),
		"columns 4 to 132 of bf16": nn.GemmLaunch(nn.Product{A: y.matrix(bf16, 160, 256, 256).Columns(4, 128), B: y.matrix(bf16, 128, 128, 128), C: y.matrix(f32, 160, 128, 128)}),
	} {
		if done, err := p.Launch(l.Kernel, l.Args(), 0); done || err != nil {
			t.Errorf("%s: done %v, %v", name, done, err)
		}
	}
	if f.calls["cublasLtMatrixLayoutCreate"] != 0 {
		t.Error("the library was asked about what is not for it")
	}
}

func TestTakes(t *testing.T) {
	p, _ := newFake(t)
	y := newYard(t, 2*memory.MiB)
	for i := range 8 {
		x := y.matrix(kernels.Number(i&1), 8, 8, 8)
		if l := nn.GemmLaunch(nn.Product{A: x, B: x, C: x, TransA: i&2 != 0, TransB: i&4 != 0}); !p.Takes(l.Kernel) {
			t.Errorf("%s is not taken", l.Kernel.Name)
		}
		seg := nn.Segments{Range: x.Range.Slice(0, 8), Experts: 1}
		for _, l := range []device.Launch{
			nn.GroupedGemmLaunch(nn.Experts{A: x, B: x, C: x, TransB: i&2 != 0, Seg: seg}),
			nn.GroupedGradLaunch(nn.ExpertsGrad{A: x, B: x, C: x, Seg: seg}),
		} {
			if p.Takes(l.Kernel) {
				t.Errorf("%s is taken", l.Kernel.Name)
			}
		}
	}
}

// Every failure comes back with the function's name, and nothing is left behind.
func TestFailures(t *testing.T) {
	y := newYard(t, 2*memory.MiB)
	c := y.product(t, variant{mix: mixes[0], spare: 1, plus: another}, 128, 128, 128)
	for _, name := range []string{
		"cublasLtMatmulDescCreate", "cublasLtMatrixLayoutCreate", "cublasLtMatmulDescSetAttribute", "cublasLtMatmulPreferenceCreate",
		"cublasLtMatmulPreferenceSetAttribute", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul",
	} {
		t.Run(name, func(t *testing.T) {
			p, f := newFake(t)
			f.fail[name] = 14
			done, err := p.Launch(c.launch.Kernel, c.launch.Args(), 0)
			if done || err == nil || !strings.Contains(err.Error(), name+" failed with status 14, CUBLAS_STATUS_MADE_UP") {
				t.Errorf("done %v, %v", done, err)
			}
			clear(f.fail)
			if done, err := p.Launch(c.launch.Kernel, c.launch.Args(), 0); !done || err != nil {
				t.Errorf("afterwards: done %v, %v", done, err)
			}
		})
	}
}

// Many goroutines use one assistant; each shape is set up once.
func TestManyAtOnce(t *testing.T) {
	p, f := newFake(t)
	y := newYard(t, 2*memory.MiB)
	var all sync.WaitGroup
	for i := range 8 {
		c := y.product(t, variant{mix: mixes[0], spare: i % 2}, 128, 128, 128)
		all.Go(func() {
			for range 2 {
				if done, err := p.Launch(c.launch.Kernel, c.launch.Args(), 0); !done || err != nil {
					t.Errorf("done %v, %v", done, err)
				}
			}
		})
	}
	all.Wait()
	if n := f.calls["cublasLtMatmulAlgoGetHeuristic"]; n != 1 || len(f.ran) != 16 {
		t.Errorf("asked %d times for %d products", n, len(f.ran))
	}
}

// The structures that the library writes have the layout of its header.
func TestLayout(t *testing.T) {
	var c candidate
	if unsafe.Sizeof(c) != 96 || unsafe.Offsetof(c.workspace) != 64 || unsafe.Offsetof(c.state) != 72 {
		t.Errorf("a candidate has %d bytes, its workspace at %d and its state at %d", unsafe.Sizeof(c), unsafe.Offsetof(c.workspace), unsafe.Offsetof(c.state))
	}
}

func TestNoLibrary(t *testing.T) {
	for name, names := range map[string][]string{
		"cannot open":            {"libthatisnowhere.so.13", "/nowhere/libcublasLt.so.12"},
		"has no cublasLt":        {"libc.so.6"},
		"libthatisnowhere.so.13": {"libthatisnowhere.so.13", "libc.so.6"},
	} {
		a, err := open(names, load)
		var no *device.Unsupported
		if a != nil || !errors.As(err, &no) || !strings.Contains(no.Why, name) || no.Need == "" {
			t.Errorf("%v: %v, %v", names, a, err)
		}
	}
}

// If a library does not start, the next one is tried. If it has no memory to start, none
// is.
func TestNextLibrary(t *testing.T) {
	_, f := newFake(t)
	for s, tries := range map[status]int{1: 2, errAllocFailed: 1} {
		f.fail["cublasLtCreate"] = s
		n := 0
		a, err := open([]string{"first", "second"}, func(string) (*library, error) { n++; return fakeLibrary(), nil })
		var no *device.Unsupported
		if a != nil || n != tries || errors.As(err, &no) != (tries == 2) || !strings.Contains(err.Error(), "CUBLAS_STATUS_MADE_UP") {
			t.Errorf("status %d: %d libraries tried, %v, %v", s, n, a, err)
		}
	}
	clear(f.fail)
	a, err := open([]string{"absent", "present"}, func(name string) (*library, error) {
		if name == "absent" {
			return nil, errors.New("not there")
		}
		return fakeLibrary(), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	a.Close()
}

// The loader's own search comes first, then toolkits and Python's packages.
func TestNames(t *testing.T) {
	root := t.TempDir()
	var want []string
	for _, at := range []string{
		"toolkit/lib64/libcublasLt.so.13",
		"venv/lib/python3.9/site-packages/nvidia/cu13/lib/libcublasLt.so.13",
		"venv/lib/python3.12/site-packages/nvidia/cublas/lib/libcublasLt.so.12",
		"conda/lib/libcublasLt.so.12",
		"home/.local/lib/python3.11/site-packages/nvidia/cublas/lib/libcublasLt.so.12",
	} {
		file := filepath.Join(root, at)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o644)); err != nil {
			t.Fatal(err)
		}
		want = append(want, file)
	}
	env := map[string]string{
		"CUDA_HOME": root + "/toolkit", "VIRTUAL_ENV": root + "/venv", "CONDA_PREFIX": root + "/conda", "HOME": root + "/home", "CUDA_PATH": "[",
	}
	got := names(func(key string) string { return env[key] })
	mine := slices.DeleteFunc(slices.Clone(got), func(s string) bool { return !strings.HasPrefix(s, root) })
	if !slices.Equal(mine, want) || !slices.Equal(got[:2], []string{"libcublasLt.so.13", "libcublasLt.so.12"}) {
		t.Errorf("looks for %q, want %q among them", got, want)
	}
	for _, name := range names(func(string) string { return "" })[2:] {
		if !filepath.IsAbs(name) {
			t.Errorf("without any variable, looks for %q", name)
		}
	}
}

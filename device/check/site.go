// This file owns call sites: where in the program an operation was issued.

package check

import (
	"fmt"
	"path"
	"runtime"
	"strings"
)

// Site is a place in the program: the innermost caller outside of the packages that only
// pass work on, such as the devices and the launches of kernels.
type Site struct {
	Func string // the function's full name
	File string // the full path
	Line int
	// From is the place that called Func, such as "train/step.go:41". It tells the
	// uses of a helper apart.
	From string
}

// String returns the last folder, the file and the line, and the place of the caller.
func (s *Site) String() string {
	if s == nil || s.File == "" {
		return "an unknown place"
	}
	at := shortPath(s.File, s.Line)
	if s.From != "" {
		at += " (called from " + s.From + ")"
	}
	return at
}

func shortPath(file string, line int) string {
	dir, base := path.Split(file)
	return fmt.Sprintf("%s/%s:%d", path.Base(dir), base, line)
}

// passOn lists the packages between a program and this one: the contract, its devices
// and the typed launches of the kernels.
var passOn = []string{"device", "device/check", "device/cpu", "device/cuda", "internal/devicekit", "internal/nulldevice", kernels}

// kernels is passed with all packages below it.
const kernels = "internal/kernels"

const module = "github.com/stowage-dev/stowage/"

// passesOn reports whether a frame belongs to one of these packages. Their tests
// are programs of their own.
func passesOn(f runtime.Frame) bool {
	if strings.HasSuffix(f.File, "_test.go") {
		return false
	}
	rest, ok := strings.CutPrefix(f.Function, module)
	if !ok {
		return false
	}
	for _, p := range passOn {
		if in, ok := strings.CutPrefix(rest, p); ok && in != "" && (in[0] == '.' || p == kernels && in[0] == '/') {
			return true
		}
	}
	return false
}

// sites caches sites, because a program issues its work from few places again and again.
type sites struct {
	frames map[uintptr]runtime.Frame
	known  map[[2]uintptr]*Site
}

func newSites() sites {
	return sites{map[uintptr]runtime.Frame{}, map[[2]uintptr]*Site{}}
}

// callSite returns the site that called into the checker. It costs a few hundred
// nanoseconds: only the frames up to the site are walked.
func (s *sites) callSite() *Site {
	var pcs [8]uintptr
	for skip, want := 3, 4; skip < 64; skip, want = skip+want-1, len(pcs) {
		n := runtime.Callers(skip, pcs[:want])
		for i := range n {
			if passesOn(s.frame(pcs[i])) {
				continue
			}
			if i+1 == n && n == want {
				break // the caller of the site is in the next batch
			}
			key := [2]uintptr{pcs[i]}
			if i+1 < n {
				key[1] = pcs[i+1]
			}
			return s.site(key)
		}
		if n < want {
			break
		}
	}
	return &Site{}
}

func (s *sites) site(key [2]uintptr) *Site {
	if at := s.known[key]; at != nil {
		return at
	}
	f := s.frame(key[0])
	at := &Site{Func: f.Function, File: f.File, Line: f.Line}
	if key[1] != 0 {
		if from := s.frame(key[1]); !strings.HasPrefix(from.Function, "runtime.") && !strings.HasPrefix(from.Function, "testing.") {
			at.From = shortPath(from.File, from.Line)
		}
	}
	s.known[key] = at
	return at
}

// frame returns one logical frame; runtime.Callers gives one address for each, also
// for those that were inlined.
func (s *sites) frame(pc uintptr) runtime.Frame {
	f, ok := s.frames[pc]
	if !ok {
		f, _ = runtime.CallersFrames([]uintptr{pc}).Next()
		s.frames[pc] = f
	}
	return f
}

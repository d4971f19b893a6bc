// This file owns the tests of the compiled kernels: they are up to date, and they have
// the properties that can be checked without a GPU.

package nn

import (
	"os"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/ptx"
)

// Stale PTX is found even without a compiler, because the PTX contains the digest of its
// sources.
func TestPTXBelongsToItsSource(t *testing.T) {
	sources, err := ptx.Sources(".")
	if err != nil {
		t.Fatal(err)
	}
	if len(sources) == 0 {
		t.Fatal("no kernel sources were found")
	}
	for _, s := range sources {
		for _, target := range s.Targets {
			text, err := os.ReadFile(ptx.File(s.Name, target))
			if err != nil {
				t.Errorf("%v; run go generate ./internal/kernels/...", err)
				continue
			}
			want, err := ptx.Digest(".", s.Name, target)
			if err != nil {
				t.Fatal(err)
			}
			if ptx.DigestOf(string(text)) != want {
				t.Errorf("the PTX of %s was made from another source; run go generate ./internal/kernels/...", s.Name)
			}
			// A kernel calls no missing function and keeps its variables in registers.
			// Its only external symbol is the pool of shared memory.
			rest := strings.Replace(string(text), ".extern .shared", "", 1)
			for _, word := range []string{".extern", ".func", "call", ".local"} {
				if strings.Contains(rest, word) {
					t.Errorf("the PTX of %s contains %q", s.Name, word)
				}
			}
		}
	}
}

package gemm

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// TestRacesAreSeen runs this test in a process of its own with a race planted on each
// operand in turn. The detector must report it.
func TestRacesAreSeen(t *testing.T) {
	if !raced {
		t.Skip("this build has no race detector; use go test -race")
	}
	plan := os.Getenv("GEMM_PLANTED_RACE")
	if plan == "" {
		for _, plan := range []string{"none", "A", "B", "C", "Plus", "narrow", "block A", "block B", "block C"} {
			cmd := exec.Command(os.Args[0], "-test.run=^TestRacesAreSeen$")
			cmd.Env = append(os.Environ(), "GEMM_PLANTED_RACE="+plan)
			out, _ := cmd.CombinedOutput()
			if seen := strings.Contains(string(out), "DATA RACE"); seen != (plan != "none") {
				t.Errorf("a race on %s: seen %v\n%s", plan, seen, out)
			}
		}
		return
	}
	m := func() Matrix { return Matrix{F32: make([]float32, 64*64), Rows: 64, Cols: 64, Pitch: 64} }
	p := Product{A: m(), B: m(), C: m(), Plus: m()}
	if plan == "narrow" {
		p.C.F32, p.C.BF16 = nil, make([]uint16, 64*64)
	}
	done := make(chan bool)
	go func() {
		if strings.HasPrefix(plan, "block") {
			Block(p.C.F32, 64, p.A.F32, 64, false, p.B.F32, 64, false, 64, 64, 64, false)
		} else {
			Multiply(p)
		}
		close(done)
	}()
	// The detector looks at the order that is enforced, not at the one that happens.
	time.Sleep(20 * time.Millisecond)
	raceOn := map[string]Matrix{"A": p.A, "B": p.B, "C": p.C, "Plus": p.Plus}
	if x, ok := raceOn[strings.TrimPrefix(plan, "block ")]; ok {
		x.F32[1000] = 1
	} else if plan == "narrow" {
		p.C.BF16[1000] = 1
	}
	<-done
}

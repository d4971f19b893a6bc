// This file owns the tests of spreading work.

package parallel

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
)

func TestForCoversEachNumberOnceInFixedRuns(t *testing.T) {
	for _, n := range []int{0, 1, 2, 7, 64, 1000} {
		for _, grain := range []int{1, 3, 64, 2000} {
			var mu sync.Mutex
			var runs [][2]int
			For(n, grain, func(from, to int) {
				mu.Lock()
				defer mu.Unlock()
				runs = append(runs, [2]int{from, to})
			})
			slices.SortFunc(runs, func(a, b [2]int) int { return a[0] - b[0] })
			at := 0
			for _, r := range runs {
				if r[0] != at || r[0]%grain != 0 || r[1] != min(at+grain, n) {
					t.Fatalf("n %d grain %d: runs %v", n, grain, runs)
				}
				at = r[1]
			}
			if at != n {
				t.Fatalf("n %d grain %d: runs %v", n, grain, runs)
			}
		}
	}
}

func TestForPassesPanicsOn(t *testing.T) {
	defer func() {
		if p := recover(); fmt.Sprint(p) != "bad 5" {
			t.Errorf("recovered %v", p)
		}
	}()
	For(10, 1, func(from, _ int) {
		if from == 5 {
			panic("bad 5")
		}
	})
	t.Error("no panic")
}

// GOMAXPROCS may be any number; the threads of a job are a few for each processor.
func TestThreadsAreBounded(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2 * most))
	if n := Threads(); n != perProcessor*runtime.NumCPU() {
		t.Errorf("%d threads", n)
	}
	var mu sync.Mutex
	before, goroutines := runtime.NumGoroutine(), 0
	For(10*most, 1, func(int, int) {
		mu.Lock()
		defer mu.Unlock()
		goroutines = max(goroutines, runtime.NumGoroutine())
	})
	if goroutines-before >= most {
		t.Errorf("%d goroutines help, with room for %d", goroutines-before, most)
	}
	runtime.GOMAXPROCS(1)
	if n := Threads(); n != 1 {
		t.Errorf("%d threads of one", n)
	}
}

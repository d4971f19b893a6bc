// This file owns the tests of spreading work.

package parallel

import (
	"fmt"
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

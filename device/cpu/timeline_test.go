// This file owns the tests of wake-ups: a waiter that looks at the wrong moment must not
// sleep for ever.

package cpu

import (
	"go/ast"
	"go/parser"
	"go/token"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"
)

// reaches waits until something has become true. It gives up after a time that no machine
// needs.
func reaches(t *testing.T, what string, now func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Minute); !now(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal(what + " never happens")
		}
	}
}

// A waiter that has read the old count and is about to sleep holds the lock. Then advance
// sets the count at once, and wakes nobody before the waiter sleeps: it waits for the lock.
func TestNoWakeUpIsLost(t *testing.T) {
	line := newTimeline()
	line.waiters.Add(1) // the waiter has announced itself
	line.mu.Lock()      // and looks at the count now
	woken := make(chan struct{})
	go func() { line.advance(1); close(woken) }()
	reaches(t, "that the count is set while a waiter holds the lock", func() bool { return line.done.Load() == 1 })
	select {
	case <-woken:
		t.Error("waiters were woken while one of them was about to sleep")
	case <-time.After(10 * time.Millisecond): // no longer pause makes right code fail
	}
	line.mu.Unlock()
	<-woken
}

// A waiter that comes after the count was read has announced itself, and is woken.
func TestWaitersAnnounceThemselves(t *testing.T) {
	line := newTimeline()
	back := make(chan struct{})
	go func() { line.wait(2); close(back) }()
	reaches(t, "that a waiter announces itself", func() bool { return line.waiters.Load() == 1 })
	for range 100 { // it wakes up and goes on waiting
		line.advance(1)
		runtime.Gosched()
	}
	select {
	case <-back:
		t.Fatal("a waiter for two pieces left after the first")
	default:
	}
	line.advance(2)
	<-back
	if n := line.waiters.Load(); n != 0 {
		t.Errorf("%d waiters are counted after the last has left", n)
	}
	line.wait(2) // which is done
}

// advance sets the count before it looks for waiters, and a waiter announces itself before it looks at the count. In any other
// order a waiter that comes between the two of advance sleeps for ever, which takes nanoseconds that no test hits. So
// this one reads the source.
func TestOrderOfAWakeUp(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "timeline.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	calls := map[string][]string{} // of the two atomic numbers, by function
	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if number, ok := call.X.(*ast.SelectorExpr); ok && (number.Sel.Name == "done" || number.Sel.Name == "waiters") {
				calls[f.Name.Name] = append(calls[f.Name.Name], number.Sel.Name+"."+call.Sel.Name)
			}
			return true
		})
	}
	if got, want := calls["advance"], []string{"done.Store", "waiters.Load"}; !slices.Equal(got, want) {
		t.Errorf("advance calls %v, want %v", got, want)
	}
	if got, want := calls["wait"], []string{"done.Load", "waiters.Add", "done.Load", "waiters.Add"}; !slices.Equal(got, want) {
		t.Errorf("wait calls %v, want %v: whether it waits at all, and then in this order", got, want)
	}
}

// returns fails the test if the functions do not all come back.
func returns(t *testing.T, what string, all ...func()) {
	t.Helper()
	var wg sync.WaitGroup
	for _, f := range all {
		wg.Go(f)
	}
	back := make(chan struct{})
	go func() { wg.Wait(); close(back) }()
	select {
	case <-back:
	case <-time.After(5 * time.Minute):
		t.Fatal(what + " never end")
	}
}

// All that wait for one point are woken.
func TestAllWaitersAreWoken(t *testing.T) {
	line := newTimeline()
	wait := func() { line.wait(1) }
	returns(t, "three waiters for one piece", wait, wait, wait, func() {
		reaches(t, "that three wait", func() bool { return line.waiters.Load() == 3 })
		for range 100 { // most likely they are asleep by now
			runtime.Gosched()
		}
		line.advance(1)
	})
}

// Two queues that wait for each other in turn never stop.
func TestTimelinesInTurn(t *testing.T) {
	a, b := newTimeline(), newTimeline()
	const rounds = 20000
	returns(t, "two queues in turn", func() {
		for i := uint64(1); i <= rounds; i++ {
			a.wait(2 * i)
			b.advance(i)
		}
	}, func() {
		for i := uint64(1); i <= rounds; i++ {
			a.advance(2*i - 1)
			a.advance(2 * i)
			b.wait(i)
		}
	})
}

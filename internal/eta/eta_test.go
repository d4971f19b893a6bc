// This file tests estimates and times.

package eta

import (
	"testing"
	"time"
)

func TestClock(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", 59600 * time.Millisecond: "1m00s", 3599 * time.Second: "59m59s", time.Hour: "1h00m", 25 * time.Hour: "1d01h",
		5*time.Minute + 13*time.Second + 530480*time.Microsecond: "5m14s",
	} {
		if got := Clock(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

// The remaining time follows from the last steps of all parts, counts down between them,
// and forgets slow first steps.
func TestPace(t *testing.T) {
	start := time.Unix(1000, 0)
	p := NewPace([]string{"a", "b"}, 30, 10)
	if done, all := p.Progress(); done != 20 || all != 60 {
		t.Errorf("%d of %d", done, all)
	}
	p.Step("a", 11, start.Add(-time.Hour))
	if _, ok := p.Left(start); ok {
		t.Error("one step is enough for an estimate")
	}
	now := start
	for i := range 10 {
		p.Step("a", 12+i, now)
		now = now.Add(2 * time.Second)
		p.Step("b", 11+i, now)
		now = now.Add(2 * time.Second)
	}
	last := now.Add(-2 * time.Second)
	if done, all := p.Progress(); done != 21+20 || all != 60 {
		t.Errorf("%d of %d", done, all)
	}
	for later, want := range map[time.Duration]time.Duration{0: 38 * time.Second, 3 * time.Second: 35 * time.Second, time.Hour: 0} {
		if got, ok := p.Left(last.Add(later)); !ok || got != want {
			t.Errorf("%v later: %v, %v, want %v", later, got, ok, want)
		}
	}
	var none *Pace
	none.Step("a", 1, now)
	if _, ok := none.Left(now); ok {
		t.Error("a nil pace has an estimate")
	}
}

// This file owns what scopes trace and say, and errors that must not be lost.

package capture

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Captures and replays are traced with all numbers of their scope.
func TestTraceOfScopes(t *testing.T) {
	l := &lab{}
	var got []string
	s := New(l, Config{WarmUp: 1, Emit: func(e trace.Event) {
		got = append(got, fmt.Sprint(e.Kind, " ", e.Name, e.Chunk, e.Layer, e.Microbatch))
	}})
	k := Key{Scope: memory.MLP, Chunk: 1, Layer: 2, Microbatch: 3}
	for range 3 {
		if err := s.Run(k, l.body); err != nil {
			t.Fatal(err)
		}
	}
	name := memory.MLP.String()
	if want := fmt.Sprint([]string{fmt.Sprint(trace.Capture, " ", name, 1, 2, 3), fmt.Sprint(trace.Replay, " ", name, 1, 2, 3)}); fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// What ranks cannot agree on ends the call, and nothing is done.
func TestNoAgreement(t *testing.T) {
	l, apart := &lab{}, errors.New("a rank is gone")
	s := New(l, Config{WarmUp: 1, Agree: func(Key, Next) (Next, error) { return NextEager, apart }})
	k := Key{Scope: memory.Attn}
	if err := s.Run(k, l.body); err != apart || l.bodies != 0 {
		t.Errorf("%v after %d calls", err, l.bodies)
	}
	if err := s.RunEagerly(k, l.body); err != apart || l.bodies != 0 {
		t.Errorf("%v after %d calls", err, l.bodies)
	}
}

// A graph that cannot be closed is an error wherever it ends: at another generation, when it
// has moved, and when another rank captures again.
func TestGraphsThatDoNotClose(t *testing.T) {
	broken := errors.New("it does not close")
	for name, change := range map[string]func(l *lab, next *Next){
		"generation": func(l *lab, _ *Next) { l.generation++ }, "moved": func(l *lab, _ *Next) { l.failReplay = &movedError{true} }, "again": func(_ *lab, n *Next) { *n = NextCapture },
	} {
		l, next := &lab{}, NextReplay
		s := New(l, Config{WarmUp: 1, Generation: func() int { return l.generation }, Agree: func(_ Key, n Next) (Next, error) {
			if n == NextReplay {
				return next, nil
			}
			return n, nil
		}})
		k := Key{Scope: memory.Attn, Layer: 4}
		for range 3 {
			if err := s.Run(k, l.body); err != nil {
				t.Fatal(name, err)
			}
		}
		l.failClose = broken
		change(l, &next)
		bodies := l.bodies
		if err := s.Run(k, l.body); !errors.Is(err, broken) || !strings.Contains(err.Error(), "capture: closing the graph of "+k.String()) || l.bodies != bodies {
			t.Errorf("%s: %v, %d calls", name, err, l.bodies-bodies)
		}
		l.failClose = nil
		_ = s.Close()
	}
}

// All that is refused is said, first and last; what joins is added whole.
func TestEverythingRefusedIsSaid(t *testing.T) {
	r := &Report{
		Scopes: []Finding{{Name: "s", Placement: Refused, Why: "one"}, {Name: "t", Placement: Inside, Why: "not"}, {Name: "u", Placement: Refused, Why: "two"}},
		Groups: []Group{{Name: "a", Placement: Refused, Why: "three"}, {Name: "b", Placement: Outside, Why: "not"}, {Name: "c", Placement: Refused, Why: "four"}},
	}
	if err := r.Err(); fmt.Sprint(err) != "one\ntwo\nthree\nfour" {
		t.Error(err)
	}
	j := (&Report{Groups: []Group{{Name: "b"}}}).Join(&Report{Groups: []Group{{Name: "a"}, {Name: "b"}, {Name: "c"}}})
	if len(j.Groups) != 3 || j.Groups[0].Name != "a" || j.Groups[2].Name != "c" {
		t.Errorf("%+v", j.Groups)
	}
	for _, s := range []memory.Scope{memory.MoE, memory.MoERouter, memory.MLP} {
		d := Detect(memory.Scopes(1<<s), Settings{WarmUp: 1, Dense: s != memory.MLP, MoE: s == memory.MLP})
		if d.Captured != 0 || len(d.Scopes) != 1 || d.Scopes[0].Placement != SwitchedOff || d.Scopes[0].Name != s.String() {
			t.Errorf("%v: %+v", s, d)
		}
		d = Detect(memory.Scopes(1<<s), Settings{WarmUp: 1, Dense: true, MoE: true})
		if d.Captured != 1<<s || d.Scopes[0].Placement != Inside {
			t.Errorf("%v: %+v", s, d)
		}
	}
}

// A stream that is part of a capture already is named.
func TestCaptureInsideACapture(t *testing.T) {
	dev, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	s, err := dev.NewStream("work")
	if err != nil {
		t.Fatal(err)
	}
	s.BeginCapture()
	_, err = OnStream(s).Capture(func() error { return nil })
	var why *device.CaptureError
	if !errors.As(err, &why) || why.Stream != "work" {
		t.Error(err)
	}
	if g, err := s.EndCapture(); err != nil {
		t.Error(err)
	} else if err := errors.Join(g.Close(), s.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

package trace_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"

	"github.com/stowage-dev/stowage/trace"
)

// SPEC S6.5: what was written is read back as it was.
func TestLines(t *testing.T) {
	var b bytes.Buffer
	l := trace.NewLines(&b)
	want := []trace.Event{
		{What: trace.Begin},
		{Step: 3, Rank: 1, What: trace.Leave, Name: "core_attn", Chunk: 1, Layer: 2, Microbatch: 4, Bytes: 5, Device: 6, Host: 7},
		{What: trace.Decide, Name: "offload"},
	}
	for _, e := range want {
		l.Emit(e)
	}
	if err := l.Err(); err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(&b)
	for i, w := range want {
		var got trace.Event
		if err := dec.Decode(&got); err != nil || got != w {
			t.Errorf("event %d: %+v, %v; want %+v", i, got, err, w)
		}
	}
	var bad trace.What
	if bad.UnmarshalText([]byte("vanish")) == nil {
		t.Error("an unknown kind was read")
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("the disk is full") }

func TestLinesRememberTheFirstError(t *testing.T) {
	l := trace.NewLines(full{})
	l.Emit(trace.Event{})
	l.Emit(trace.Event{})
	if l.Err() == nil {
		t.Error("an error was lost")
	}
}

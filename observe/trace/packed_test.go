// This file tests the limit of events that are read.

package trace

import (
	"bytes"
	"testing"
)

// A trace with more events than are read hands out the first ones, every time.
func TestMostEvents(t *testing.T) {
	var b bytes.Buffer
	w := NewWriter(&b, Header{}, 1<<20)
	for i := range 9 {
		w.Emit(Event{Kind: Launch, Time: int64(i)})
		if i%4 == 3 {
			w.Emit(Event{Kind: End})
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	read, err := ReadPacked(&b)
	if err != nil || read.count != 11 {
		t.Fatalf("%d events, %v", read.count, err)
	}
	for most := range 12 {
		read.count = most
		for range 2 {
			n := 0
			for e := range read.All() {
				if e == nil {
					t.Fatal("no event")
				}
				n++
			}
			if n != most {
				t.Errorf("%d events of %d", n, most)
			}
		}
	}
}

// This file tests the progress of commands.

package main

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A meter says nothing for two seconds, then how far the work is and when it ends, and
// leaves nothing behind.
func TestMeter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w bytes.Buffer
		m := newMeter(&w, "measuring")
		last := func(want string) {
			t.Helper()
			synctest.Wait()
			m.mu.Lock()
			defer m.mu.Unlock()
			if got := w.String(); !strings.HasSuffix(got, want) || want == "" && got != "" {
				t.Errorf("after %v the terminal got %q, want %q at its end", time.Since(m.began), got, want)
			}
		}
		time.Sleep(1900 * time.Millisecond)
		last("")
		time.Sleep(200 * time.Millisecond)
		last("\rmeasuring, 2s so far\x1b[K")
		time.Sleep(7900 * time.Millisecond)
		m.at(5, 20)
		time.Sleep(time.Second) // after 11 s a quarter is done
		last("\rmeasuring, 25 % done, about 33s left\x1b[K")
		for range 2 { // there is nothing left for the second one
			m.wipe()
			last("left\x1b[K\r\x1b[K")
		}
		time.Sleep(time.Second)
		m.at(20, 20)
		time.Sleep(time.Second)
		last("\rmeasuring, 100 % done, about 0s left\x1b[K")
		m.end()
		m.end()
		last("\r\x1b[K")
		time.Sleep(time.Minute)
		last("\r\x1b[K")
	})
	var none *meter
	none.at(1, 2)
	none.wipe()
	none.end()
}

// Work that is over soon shows nothing.
func TestMeterOfShortWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w bytes.Buffer
		m := newMeter(&w, "measuring")
		time.Sleep(time.Second)
		m.at(1, 1)
		m.end()
		if w.Len() > 0 {
			t.Errorf("the terminal got %q", w.String())
		}
	})
}

// On a terminal a long command shows the line, and only its result stays.
func TestMeterAtTerminal(t *testing.T) {
	if testing.Short() {
		t.Skip("takes as long as a meter waits")
	}
	t.Chdir(t.TempDir())
	w := atTerminal(t, "bench stash --rows 16 --width 64 --time 1500ms")
	w.until(t, `\rmeasuring, .* left\x1b\[K`)
	if text := w.end(t, exitOK); !strings.HasSuffix(text, "\r\x1b[K") || !strings.Contains(w.stdout.String(), "ratio") {
		t.Errorf("the terminal got %q, the output is %q", text, w.stdout.String())
	}
}

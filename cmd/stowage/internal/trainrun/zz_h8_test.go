package trainrun

import (
	"math/rand"
	"testing"
	"time"
)

func TestZZ(t *testing.T) {
	d := Defaults()
	text, _ := d.Text()
	seeds := []string{string(text), "policy: offload\noffload_modules: [core_attn, attn_proj]\nbudget: 60MiB\naux_loss: 0.5\n", "model: {model_type: llama, hidden_size: 8}\n", "policy: !!binary x\nx: &a *a", "steps: many", "a: ["}
	r := rand.New(rand.NewSource(1))
	began := time.Now()
	n := 0
	for ; time.Since(began) < 10*time.Second; n++ {
		b := []byte(seeds[r.Intn(len(seeds))])
		for k := 0; k < 1+r.Intn(3); k++ {
			switch i := r.Intn(len(b)); r.Intn(3) {
			case 0:
				b[i] = byte(r.Intn(256))
			case 1:
				b = append(b[:i:i], b[min(len(b), i+1+r.Intn(4)):]...)
			case 2:
				b = append(b[:i:i], append([]byte{" \n\t:-[]{}&*!|>'\"#,?%@`"[r.Intn(22)]}, b[i:]...)...)
			}
			if len(b) == 0 {
				b = []byte("x")
			}
		}
		done := make(chan bool)
		go func() {
			defer close(done)
			o := Defaults()
			if o.parse("f", b) == nil {
				if out, err := o.Text(); err == nil {
					again := Defaults()
					if err := again.parse("f", out); err != nil {
						t.Errorf("%q -> %q: %v", b, out, err)
					} else if x, _ := again.Text(); string(x) != string(out) {
						t.Errorf("%q -> %q: %q", b, out, x)
					}
				}
			}
		}()
		select {
		case <-done:
		case <-time.After(3 * time.Second):
			t.Fatalf("%d hang: %q\n", n, b)
		}
	}
	t.Log(n)
}
